"""Writes what was measured: JSON for programs, PNG pictures, and one HTML page that holds everything."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from bench.load.campaign import Run
from bench.load.goodput import CapacitySearch, Judged
from bench.load.results import Setup, file_name, run_document, sweep_document, write_json
from bench.load.summary import GROUPINGS, summarize_by
from bench.report import machine, markdown_table

MISSING_PICTURES = "pictures need matplotlib: install the extra 'bench' (pip install -e '.[bench]'), or give --no-plots"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-size: 13px; }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; min-width: 9em; }
th { border-bottom: 2px solid #999; }
img { max-width: 100%; }
.warning { background: #fff3d6; padding: .5em 1em; }
.small { color: #666; font-size: 13px; }
"""
_COLUMNS = (
    ("sent", "num_prompts", 0),
    ("completed", "completed", 0),
    ("refused", "refused", 0),
    ("failed", "failed", 0),
    ("req/s", "request_throughput", 3),
    ("good/s", "request_goodput", 3),
    ("good", "slo_attainment", 3),
    ("out tok/s", "output_throughput", 1),
    ("TTFT P50", "p50_ttft_ms", 0),
    ("P99", "p99_ttft_ms", 0),
    ("TPOT P50", "p50_tpot_ms", 1),
    ("P99", "p99_tpot_ms", 1),
    ("ITL P99", "p99_itl_ms", 1),
    ("E2E P50", "p50_e2el_ms", 0),
    ("P99", "p99_e2el_ms", 0),
)
"""Heading, key of the figures, decimals; times in milliseconds."""


def can_draw() -> bool:
    """Whether the pictures' library is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_all(
    folder: Path,
    runs: Sequence[Run],
    setup: Setup,
    *,
    search: CapacitySearch | None = None,
    tried: Sequence[Judged] = (),
    is_detailed: bool = False,
    has_pictures: bool = True,
) -> Path:
    """Writes everything into the folder, pictures last; returns the file to look at first."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{file_name(index, run)}.json" for index, run in enumerate(runs)]
    for path, run in zip(paths, runs, strict=True):
        write_json(path, run_document(run, setup, is_detailed=is_detailed))
    write_json(folder / "sweep.json", sweep_document(runs, setup, search, tried))
    if not has_pictures:
        return paths[0] if paths else folder
    pictures = _draw(folder, runs, setup, search.capacity(tried) if search else None, search.target if search else 0.9)
    page = folder / "report.html"
    page.write_text(html(runs, setup, pictures, search, tried), encoding="utf-8")
    return page


def _draw(
    folder: Path, runs: Sequence[Run], setup: Setup, capacity: float | None, target: float
) -> dict[str, list[Path]]:
    """Paths of the pictures by heading: of the sweep, then of each run."""
    from bench.load import plots  # here, because matplotlib is an extra

    answered = [run for run in runs if any(record.is_completed for record in run.records)]
    drawn: dict[str, list[Path]] = {}
    if answered:
        sweep = []
        if len({run.point.offered for run in answered}) > 1:
            sweep.append(plots.save(plots.latency_by_load(answered, setup.rule), folder / "latency.png"))
            sweep.append(plots.save(plots.latency_by_throughput(answered), folder / "knee.png"))
            sweep.append(plots.save(plots.goodput(runs, setup.rule, capacity, target), folder / "goodput.png"))
            sweep.append(plots.save(plots.throughput_by_concurrency(answered), folder / "throughput.png"))
        drawn["All runs"] = sweep
    tenants = [str(tenant["id"]) for tenant in setup.tenants]
    for index, run in enumerate(runs):
        name = file_name(index, run)
        if run.records:
            drawn[f"Run {index + 1}: {run.point.label}"] = [
                plots.save(plots.latency_distribution(run), folder / f"{name}-latency.png"),
                plots.save(plots.timeline(run), folder / f"{name}-timeline.png"),
                plots.save(plots.service(run, tenants), folder / f"{name}-service.png"),
            ]
    return drawn


def html(
    runs: Sequence[Run],
    setup: Setup,
    pictures: Mapping[str, Sequence[Path]],
    search: CapacitySearch | None,
    tried: Sequence[Judged],
) -> str:
    """One page without any reference to another file."""
    parts = [f"<h1>Load on {escape(setup.model)}</h1>", *_setup_lines(runs, setup)]
    if search is not None:
        parts.append(f"<p><b>{escape(capacity_line(search, tried, setup))}</b></p>")
    parts.extend(f'<p class="warning">{escape(line)}</p>' for line in warnings(runs))
    figures = [(f"{index + 1}: {run.point.label}", run.figures) for index, run in enumerate(runs)]
    parts += ["<h2>Figures</h2>", _table("run", figures), '<p class="small">Times in milliseconds.</p>']
    parts.extend(_images("All runs", pictures.get("All runs", ())))
    for index, run in enumerate(runs):
        heading = f"Run {index + 1}: {run.point.label}"
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts.append(_failures(run))
        for name, key in GROUPINGS.items():
            parts.append(_table(name, summarize_by(run.records, key, run.duration_s, setup.rule).items()))
        parts.extend(_images(heading, pictures.get(heading, ())))
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>Load on {escape(setup.model)}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def markdown(
    runs: Sequence[Run], setup: Setup, search: CapacitySearch | None, tried: Sequence[Judged], command: str
) -> str:
    """The block of the performance page."""
    rows = [["ms where not said otherwise", *(name for name, _, _ in _COLUMNS)]]
    for run in runs:
        rows.append([run.point.label, *(_cell(run.figures.get(key), decimals) for _, key, decimals in _COLUMNS)])
    facts = (
        f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine()}; {setup.model}; good: {setup.rule}; lengths times "
        f"{setup.workload.get('length_scale', 1)}.\nCommand: `{command}`"
    )
    parts = [facts, markdown_table(rows), *warnings(runs)]
    if search is not None:
        parts.append(capacity_line(search, tried, setup))
    return "\n\n".join(parts)


def warnings(runs: Iterable[Run]) -> list[str]:
    """What a reader must know before trusting the figures."""
    lines = []
    for run in runs:
        name = run.point.label
        if not run.is_whole:
            lines.append(
                f"{name}: stopped early; {len(run.records)} of {run.num_planned} requests were sent, "
                f"{run.figures['interrupted']} of them interrupted."
            )
        if run.figure("failed"):
            lines.append(f"{name}: {run.figures['failed']} failed, refusals included: {run.figures['failures']}.")
        if run.figure("short_answers"):
            lines.append(f"{name}: {run.figures['short_answers']} answers are shorter than asked for.")
        lag = run.figure("p99_send_lag_ms")
        if lag is not None and lag > MAX_SEND_LAG_MS and run.point.concurrency is None:
            lines.append(f"{name}: P99 of the delay in sending is {lag:.0f} ms, which counts as latency here.")
        if run.timeline.num_errors:
            lines.append(
                f"{name}: metrics could not be read {run.timeline.num_errors} times: {run.timeline.last_error}"
            )
    return lines


MAX_SEND_LAG_MS = 50.0
"""Above this the load generator, or its limit of requests in flight, is a part of what was measured."""


def capacity_line(search: CapacitySearch, tried: Sequence[Judged], setup: Setup) -> str:
    """The outcome of a search in a sentence."""
    capacity = search.capacity(tried)
    rule = f"at least {search.target:.0%} of requests with {setup.rule}"
    if capacity is None:
        return f"Capacity not found: no rate that was tried serves {rule}."
    beyond = " or more" if all(each.rate <= capacity for each in tried) else ""
    return f"Capacity: {capacity:.3g} requests/s{beyond} serve {rule}."


def _setup_lines(runs: Sequence[Run], setup: Setup) -> list[str]:
    """Where, when, and what was sent by whom."""
    workload = dict(setup.workload)
    trace = workload.pop("trace", None)
    lines = [
        f"Measured {runs[0].date if runs else '-'} (UTC), load from {machine()}",
        f"Workload {workload.pop('name', '')}: {_facts(workload | dict(setup.arrivals))}",
        f"Good: {setup.rule}",
    ]
    if isinstance(trace, Mapping):
        lines.insert(2, f"Trace: {_facts(trace)}")
    lines += [f"Tenant {tenant.get('id')}: {_facts(tenant, without='id')}" for tenant in setup.tenants]
    return [f'<p class="small">{"<br>".join(escape(line) for line in lines)}</p>']


def _facts(facts: Mapping[str, object], without: str = "") -> str:
    """What is known, in words."""
    known = {name: value for name, value in facts.items() if value not in (None, "", {}) and name != without}
    return ", ".join(
        f"{name.replace('_', ' ')} {f'({_facts(value)})' if isinstance(value, Mapping) else value}"
        for name, value in known.items()
    )


def _failures(run: Run) -> str:
    failures = run.figures.get("failures")
    if not isinstance(failures, dict) or not failures:
        return "<p>No request failed or was refused.</p>"
    items = "".join(f"<li>{number} times {escape(outcome)}</li>" for outcome, number in failures.items())
    return f"<p>Failed and refused:</p><ul>{items}</ul>"


def _table(heading: str, rows: Iterable[tuple[str, Mapping[str, object]]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in (heading, *(name for name, _, _ in _COLUMNS)))
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{_cell(figures.get(key), decimals)}</td>" for _, key, decimals in _COLUMNS)
        + "</tr>"
        for name, figures in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object, decimals: int) -> str:
    return f"{value:,.{decimals}f}" if isinstance(value, int | float) else "-"


def _images(heading: str, paths: Iterable[Path]) -> list[str]:
    return [
        f'<img alt="{escape(heading)}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for path in paths
    ]
