"""`python -m bench tune`: the bounds of a step at which this machine makes most tokens within given latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.load.results import surroundings, write_json
from bench.load.summary import Distribution
from bench.modes.summary import NOISE
from bench.modes.trial import Server, Setting, Trial, TrialError
from bench.modes.workloads import MIXES, mix
from bench.report import PAGE, machine, markdown_table, replace_block

if TYPE_CHECKING:
    from bench.modes.session import OpenModel

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
REQUESTS_PER_USER = 4
SIZES = (1, 2, 4, 8, 16, 32, 64)
BUDGETS = (64, 128, 256, 512)
BLOCK_SIZES = (8, 16, 32)
BAR_WIDTH = 20
MAX_DRIFT = 0.1
"""By how much the first candidate may differ when it is measured again at the end, before the curve is in doubt."""


@dataclass(frozen=True, slots=True)
class Target:
    """Limits of the 99th percentiles, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is tried; names are those of the worker's settings."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Measured:
    """What a candidate does with all its slots in use. Latencies leave out the first request of each user."""

    candidate: Candidate
    output_rate: float  # tokens a second
    p99_ttft_ms: float
    p99_tpot_ms: float

    def excess(self, target: Target) -> float:
        """The worse of the two latencies, as a multiple of its limit."""
        return max(self.p99_ttft_ms / target.ttft_ms, self.p99_tpot_ms / target.tpot_ms)

    def meets(self, target: Target) -> bool:
        """Whether both limits are kept."""
        return self.excess(target) <= 1


@dataclass(frozen=True, slots=True)
class Grid:
    """What may be chosen from, each in ascending order."""

    sizes: Sequence[int] = SIZES
    budgets: Sequence[int] = BUDGETS
    block_sizes: Sequence[int] = BLOCK_SIZES


def search(measure: Callable[[Candidate], Measured], target: Target, grid: Grid, block_size: int) -> Iterator[Measured]:
    """One bound after the other, each at the best of those before: slots, then the token budget, then the block size.

    Slots grow until a limit is broken or nothing is gained: every further one makes all requests slower. What was
    measured is yielded as it comes.
    """
    tried: list[Measured] = []

    def attempt(candidate: Candidate) -> Measured:
        tried.append(measure(candidate))
        return tried[-1]

    for size in grid.sizes:
        former = tried[-1] if tried else None
        found = attempt(Candidate(size, max(grid.budgets), block_size))
        yield found
        if not found.meets(target) or (former and found.output_rate <= former.output_rate * (1 + NOISE)):
            break
    base = recommend(tried, target) or closest(tried, target)
    for budget in grid.budgets:
        if base.candidate.max_num_seqs <= budget != base.candidate.max_num_batched_tokens:
            yield attempt(replace(base.candidate, max_num_batched_tokens=budget))
    base = recommend(tried, target) or closest(tried, target)
    for size in grid.block_sizes:
        if size != base.candidate.block_size:
            yield attempt(replace(base.candidate, block_size=size))


def recommend(tried: Iterable[Measured], target: Target) -> Measured | None:
    """The fastest that keeps the limits; an earlier one if it is as fast but for noise. None: none keeps them."""
    chosen: Measured | None = None
    for each in tried:
        if each.meets(target) and (chosen is None or each.output_rate > chosen.output_rate * (1 + NOISE)):
            chosen = each
    return chosen


def closest(tried: Sequence[Measured], target: Target) -> Measured:
    """Which breaks the limits least. Raises ValueError if nothing was tried."""
    return min(tried, key=lambda each: each.excess(target))


def figures(candidate: Candidate, trial: Trial) -> Measured:
    """Of a closed loop: the rate while all users were at work, and what requests saw that came to a loaded engine."""
    last_sent_s = max(times.scheduled_s for times in trial.times)
    num_tokens = sum(at <= last_sent_s for times in trial.times for at in times.token_s)
    settled = trial.times[candidate.max_num_seqs :]
    ttft = Distribution.of(times.ttft_s for times in settled).ms(99)
    tpot = Distribution.of(times.tpot_s for times in settled).ms(99)
    return Measured(candidate, num_tokens / last_sent_s if last_sent_s else 0.0, ttft or 0.0, tpot or 0.0)


def curve(tried: Sequence[Measured], target: Target) -> Table:
    """All that was measured, in order; what breaks a limit is marked."""
    best = recommend(tried, target)
    fastest = max((each.output_rate for each in tried), default=1.0) or 1.0
    table = Table(box=None, padding=(0, 1, 0, 0), caption="P99 in ms; ! breaks the limit; * recommended")
    for name in ("", "seqs", "tokens", "block", "TTFT", "TPOT", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in tried:
        candidate = each.candidate
        table.add_row(
            "*" if each is best else "",
            str(candidate.max_num_seqs),
            str(candidate.max_num_batched_tokens),
            str(candidate.block_size),
            f"{each.p99_ttft_ms:.0f}{'!' if each.p99_ttft_ms > target.ttft_ms else ' '}",
            f"{each.p99_tpot_ms:.1f}{'!' if each.p99_tpot_ms > target.tpot_ms else ' '}",
            f"{each.output_rate:.1f}",
            "█" * round(BAR_WIDTH * each.output_rate / fastest),
        )
    return table


def page_block(tried: Sequence[Measured], target: Target, workload: str, scale: float, num_threads: int) -> str:
    """The curve and what follows from it, for the performance page."""
    best = recommend(tried, target)
    rows = [["", "max_num_seqs", "max_num_batched_tokens", "block_size", "TTFT P99 ms", "TPOT P99 ms", "tokens/s"]]
    for each in tried:
        cells = [str(value) for value in asdict(each.candidate).values()]
        latencies = [f"{each.p99_ttft_ms:.0f}", f"{each.p99_tpot_ms:.1f}", f"{each.output_rate:.1f}"]
        rows.append(["recommended" if each is best else "", *cells, *latencies])
    facts = (
        f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine()}; {num_threads} threads; workload {workload}, lengths "
        f"times {scale:g}.\nCommand: `python -m bench tune --ttft {target.ttft_ms:g} --tpot {target.tpot_ms:g} --page`"
    )
    return f"{facts}\n\n{markdown_table(rows)}\n\n{advice(tried, target)}"


def drift(first: Measured, again: Measured) -> float:
    """By what share the rate of the same candidate changed in the course of the search; other work is to blame."""
    low, high = sorted((first.output_rate, again.output_rate))
    return high / low - 1 if low else 0.0


def advice(tried: Sequence[Measured], target: Target) -> str:
    """The recommended setting, ready to be pasted; or what is missing."""
    best = recommend(tried, target)
    limits = f"P99 TTFT ≤ {target.ttft_ms:g} ms and P99 TPOT ≤ {target.tpot_ms:g} ms"
    if best is not None:
        settings = " ".join(f"TIDEGATE_WORKER_{name.upper()}={value}" for name, value in asdict(best.candidate).items())
        return f"{limits}: {settings} makes {best.output_rate:.1f} output tokens/s."
    nearest = closest(tried, target)
    return f"No setting that was tried keeps {limits}; the closest needs {nearest.excess(target):.2f} times as long."


def tune(
    ttft: Annotated[float, typer.Option(min=0.1, help="Limit of the P99 TTFT, in ms.")],
    tpot: Annotated[float, typer.Option(min=0.1, help="Limit of the P99 TPOT, in ms.")],
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(MIXES)}.")] = "short only",
    scale: Annotated[float, typer.Option(min=0.01, help="Multiplies all lengths.")] = 1.0,
    model: Annotated[Path | None, typer.Option(help="GGUF file or Hugging Face folder; else the default one.")] = None,
    kv_cache_mib: Annotated[int, typer.Option(min=8, help="Memory of the KV cache.")] = 1024,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 2,
    max_seqs: Annotated[int, typer.Option(min=1, max=64, help="Largest max_num_seqs that is tried.")] = 64,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File of the results, JSON.")] = None,
    limit_s: Annotated[
        float, typer.Option("--limit", min=1.0, help="Seconds; then no other candidate begins.")
    ] = 600.0,
    page: Annotated[bool, typer.Option("--page", help=f"Write the curve into {PAGE}.")] = False,
) -> None:
    """Find max_num_seqs, token budget and block size for latencies that shall be kept, on this machine.

    Each candidate serves as many users as it has slots, in mode full and in this process, so no request waits for a
    slot: what the gateway's queue adds is not in these latencies. Exit status: 0 found, 1 failed or not found, 2 wrong
    usage, 130 stopped early.
    """
    if workload not in MIXES:
        raise typer.BadParameter(f"--workload {workload!r}: allowed are {', '.join(MIXES)}")
    if page and not PAGE.is_file():
        raise typer.BadParameter(f"--page writes into {PAGE}, which is not here: run it in the project's folder")
    console = Console()
    target = Target(ttft, tpot)
    grid = Grid(sizes=[size for size in SIZES if size <= max_seqs])
    from bench.modes.session import OpenError, open_model  # here, because loading torch takes seconds

    opened: dict[int, OpenModel] = {}

    def measure(candidate: Candidate) -> Measured:
        if candidate.block_size not in opened:
            opened.clear()  # one pool at a time
            opened[candidate.block_size] = open_model(
                model,
                "auto",
                kv_cache_mib,
                max(grid.sizes),
                threads,
                console,
                block_size=candidate.block_size,
                max_num_batched_tokens=max(grid.budgets),
            )
        ready = opened[candidate.block_size]
        num_requests = REQUESTS_PER_USER * max(4, candidate.max_num_seqs)
        work = mix(workload, num_requests, seed=seed, vocab_size=ready.limits.vocab_size, scale=scale)
        setting = Setting("full", candidate.max_num_seqs, candidate.max_num_batched_tokens)
        with _shown(console, candidate, num_requests) as advance:
            trial = Server(ready.machine, setting, work, ready.limits).serve_users(candidate.max_num_seqs, advance)
        return figures(candidate, trial)

    tried: list[Measured] = []
    is_whole, changed = True, None
    started_s = monotonic()
    try:
        for found in search(measure, target, grid, block_size=16):
            tried.append(found)
            if monotonic() - started_s > limit_s:
                console.print(f"stopped after {limit_s:g} s; --limit gives it longer", style="yellow", highlight=False)
                is_whole = False
                break
        else:
            changed = drift(tried[0], measure(tried[0].candidate))
    except KeyboardInterrupt:
        is_whole = False
    except (OpenError, TrialError) as error:
        Console(stderr=True).print(f"bench: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    if tried:
        _tell(console, tried, target, output, workload, changed, is_whole=is_whole)
    if not is_whole:
        raise typer.Exit(EXIT_INTERRUPTED)
    if page:
        replace_block(PAGE, "tune", page_block(tried, target, workload, scale, threads))
    if recommend(tried, target) is None:
        raise typer.Exit(EXIT_FAILED)


def _tell(
    console: Console,
    tried: Sequence[Measured],
    target: Target,
    output: Path | None,
    workload: str,
    changed: float | None,
    *,
    is_whole: bool,
) -> None:
    path = output or Path(".local") / "bench" / f"tune-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    best = recommend(tried, target)
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_whole": is_whole,
        "workload": workload,
        "target": asdict(target),
        "recommended": None if best is None else asdict(best),
        "drift": changed,
        "tried": [asdict(each) for each in tried],
        "surroundings": surroundings(is_local=False),
    }
    write_json(path, document)
    console.print(curve(tried, target), highlight=False)
    console.print(advice(tried, target), style="bold", highlight=False)
    if changed is not None and changed > MAX_DRIFT:
        doubt = f"The first candidate, measured again at the end, differs by {changed:.0%}: the machine was not quiet."
        console.print(f"{doubt} Search again.", style="yellow", highlight=False)
    console.print(f"written to {path}", highlight=False)


@contextmanager
def _shown(console: Console, candidate: Candidate, num_requests: int) -> Iterator[Callable[[int], None]]:
    """A bar that grows as requests end; a line where there is no terminal."""
    label = (
        f"max_num_seqs {candidate.max_num_seqs}, max_num_batched_tokens {candidate.max_num_batched_tokens}, "
        f"block_size {candidate.block_size}"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    if not console.is_terminal:
        console.print(label, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=num_requests)
        yield lambda num_ended: progress.update(task, completed=num_ended)
