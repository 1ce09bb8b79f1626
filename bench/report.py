"""Measurements as values, as lines between processes, and as a block of a document."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

RESULT_MARK = "RESULT "
"""Begins a line of a child's output that carries a measurement; all other lines are for people."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload run once by one engine. `seconds` is wall time from the first submit to the last token."""

    engine: str
    workload: str
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None = None  # median of the requests, from the first submit; None: not taken
    tpot_ms: float | None = None  # median of the requests with two tokens or more

    @property
    def output_rate(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and generated tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    def to_line(self) -> str:
        """The measurement as one line of text; `from_line` reads it."""
        return RESULT_MARK + json.dumps(asdict(self))

    @staticmethod
    def from_line(line: str) -> Measurement | None:
        """The measurement in a line of output, or None where the line is something else."""
        if not line.startswith(RESULT_MARK):
            return None
        return Measurement(**json.loads(line[len(RESULT_MARK) :]))


def comparison(measurements: Iterable[Measurement], *, ours: str) -> list[list[str]]:
    """Rows of a table: a header, then one row per engine; cells hold the median output rate of its runs.

    The mixed workload's cell adds the total rate; every peer's cell adds our rate divided by the peer's.
    """
    runs: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in measurements:
        runs.setdefault((measurement.engine, measurement.workload), []).append(measurement)
    engines = sorted({engine for engine, _ in runs}, key=lambda engine: (engine != ours, engine))
    workloads = list(dict.fromkeys(workload for _, workload in runs))
    rows = [["output tokens/s", *workloads]]
    for engine in engines:
        cells = []
        for workload in workloads:
            mine, theirs = runs.get((ours, workload)), runs.get((engine, workload))
            cells.append(_cell(theirs, reference=mine if engine != ours else None))
        rows.append([engine, *cells])
    return rows


def _cell(runs: Sequence[Measurement] | None, *, reference: Sequence[Measurement] | None) -> str:
    if not runs:
        return "-"
    rate = median(run.output_rate for run in runs)
    text = f"{rate:.1f}"
    if any(run.prompt_tokens > run.output_tokens for run in runs):
        text += f" (total {median(run.total_rate for run in runs):.0f})"
    if reference:
        text += f", ours {median(run.output_rate for run in reference) / rate:.2f}x"
    return text


def gateway_cost(measurements: Iterable[Measurement], *, alone: str, behind: str) -> list[list[str]]:
    """Rows of a table, one for each workload that both have run: an engine alone, and behind a gateway.

    Rates and latencies are medians of the runs; what is added is the difference of these medians.
    """
    runs: dict[str, dict[str, list[Measurement]]] = {}
    for measurement in measurements:
        runs.setdefault(measurement.workload, {}).setdefault(measurement.engine, []).append(measurement)
    rows = [["gateway and wire", "alone tok/s", "behind", "ratio", "TTFT ms", "added", "TPOT ms", "added"]]
    for workload, by_engine in runs.items():
        if alone in by_engine and behind in by_engine:
            first, second = by_engine[alone], by_engine[behind]
            rates = [median(run.output_rate for run in each) for each in (first, second)]
            latencies = [_added(first, second, name) for name in ("ttft_ms", "tpot_ms")]
            cells = [f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{rates[1] / rates[0]:.2f}"]
            rows.append([workload, *cells, *latencies[0], *latencies[1]])
    return rows


def _added(alone: Sequence[Measurement], behind: Sequence[Measurement], name: str) -> tuple[str, str]:
    """A latency of the engine alone, and what comes on top of it."""
    without, with_it = (
        [value for run in runs if (value := getattr(run, name)) is not None] for runs in (alone, behind)
    )
    if not without or not with_it:
        return "-", "-"
    base = median(without)
    return f"{base:.1f}", f"{median(with_it) - base:+.1f}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table; the first row is the header, numbers are right-aligned."""
    header, *body = rows
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *body))


PAGE = Path("docs") / "performance.md"
"""Where commands leave their figures, from the project's folder."""


def replace_block(path: Path, name: str, body: str) -> None:
    """Replaces what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` in a document.

    Raises ValueError if the document does not have exactly one such block.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{path} must hold one '{begin}' followed by one '{end}'")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    path.write_text(f"{before}{begin}\n{body.strip()}\n{end}{after}", encoding="utf-8")


def machine() -> str:
    """The processor, its cores usable by this process, the vector extensions that matter here, and the memory."""
    model, flags = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text(encoding="utf-8")
        model = _field(text, "model name") or model
        flags = _field(text, "flags")
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if flag in flags.split()]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores ({', '.join(known) or 'no vector extensions listed'}), {memory_gib:.0f} GiB memory"


def _field(cpuinfo: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else ""
