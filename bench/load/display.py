"""What is seen while a measurement runs: a bar and a line of figures on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bench.load.campaign import Run
from bench.load.driver import Progress
from bench.load.plan import Point
from bench.load.summary import Distribution
from common.clock import Clock

REFRESH_S = 0.25
LINE_INTERVAL_S = 5.0  # where there is no terminal


class Display:
    """Shows the run that is under way; told of starts and ends by the campaign."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._point: Point | None = None
        self._progress = Progress()
        self._started = 0.0

    def start(self, point: Point, progress: Progress) -> None:
        """A run begins."""
        self._point, self._progress, self._started = point, progress, self._clock.monotonic()

    def end(self, run: Run) -> None:
        """A run is over: its figures stay on the screen."""
        self._point = None
        self._console.print(run_line(run), highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The run so far, in words; empty between runs."""
        if self._point is None:
            return ""
        progress, elapsed = self._progress, self._clock.monotonic() - self._started
        records = progress.records
        ttft = Distribution.of(record.ttft_s for record in records)
        p50, p99 = ttft.ms(50), ttft.ms(99)
        latency = f", TTFT P50 {p50:,.0f} P99 {p99:,.0f} ms" if p50 is not None and p99 is not None else ""
        failed = sum(record.is_failed for record in records)
        return (
            f"{self._point.label}: {elapsed:.0f} s, {len(records)} of {progress.num_planned} sent, "
            f"{progress.num_in_flight} running, {progress.num_ended} ended, {failed} failed or refused, "
            f"{progress.num_tokens / max(elapsed, 1e-9):,.0f} tok/s{latency}"
        )

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Keeps the display fresh for as long as the block lasts."""
        if self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                async with _repeating(lambda: live.update(self._render(), refresh=True), REFRESH_S):
                    yield
        else:
            async with _repeating(self._print_line, LINE_INTERVAL_S):
                yield

    def _render(self) -> RenderableType:
        if self._point is None:
            return Text("")
        bar = ProgressBar(total=max(1, self._progress.num_planned), completed=self._progress.num_ended, width=60)
        return Group(bar, Text(self.line()), Text("Ctrl-C stops and writes what was measured", style="dim"))

    def _print_line(self) -> None:
        if line := self.line():
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@asynccontextmanager
async def _repeating(action: Callable[[], None], interval_s: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(interval_s)
            action()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def run_line(run: Run) -> Text:
    """One run in a line."""
    figures = run.figures
    text = Text(f"{run.point.label}: ", style="bold")
    text.append(f"{figures['completed']} completed, {_number(figures, 'output_throughput')} tok/s, ", style="not bold")
    text.append(f"TTFT P50 {_number(figures, 'p50_ttft_ms')} P99 {_number(figures, 'p99_ttft_ms')} ms, ", "not bold")
    text.append(f"TPOT P50 {_number(figures, 'p50_tpot_ms')} P99 {_number(figures, 'p99_tpot_ms')} ms, ", "not bold")
    text.append(f"good {_number(figures, 'slo_attainment', scale=100)} %", style="not bold")
    if figures["failed"]:
        text.append(f", failed {figures['failed']} {figures['failures']}", style="red")
    if not run.is_whole:
        text.append(", stopped early", style="yellow")
    return text


def _number(figures: Mapping[str, object], name: str, *, scale: float = 1.0) -> str:
    value = figures[name]
    if not isinstance(value, int | float):
        return "-"
    scaled = value * scale
    return f"{scaled:,.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}"


def figures_table(runs: Iterable[Run]) -> Table:
    """All runs beside each other, for the end; narrow enough for 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), caption="latencies in ms", caption_justify="left")
    table.add_column("run", no_wrap=True)
    for name in ("done", "failed", "good/s", "tok/s", "TTFT P50/99", "TPOT P50/99", "E2E P99"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        number = partial(_number, run.figures)
        table.add_row(
            run.point.label,
            str(run.figures["completed"]),
            str(run.figures["failed"]),
            number("request_goodput"),
            number("output_throughput"),
            f"{number('p50_ttft_ms')}/{number('p99_ttft_ms')}",
            f"{number('p50_tpot_ms')}/{number('p99_tpot_ms')}",
            number("p99_e2el_ms"),
        )
    return table
