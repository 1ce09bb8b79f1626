"""What was measured as a table, as JSON, and as a block of the performance page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from bench.load.summary import Distribution
from bench.modes.summary import ModeFigures, WorkloadFigures
from bench.modes.trial import Trial
from bench.report import markdown_table

COLUMNS = (
    "mode",
    "batch",
    "tok/s",
    "TTFT P50/99",
    "E2E P50/99",
    "idle",
    "no step",
    "KV",
    "long done",
)


def table(figures: WorkloadFigures) -> Table:
    """One workload on a terminal of 80 columns."""
    result = Table(title=Text(_title(figures)), title_justify="left", box=None, padding=(0, 1, 0, 0))
    result.add_column(COLUMNS[0], no_wrap=True)
    for column in COLUMNS[1:]:
        result.add_column(column, justify="right", no_wrap=True)
    for each in figures.modes:
        result.add_row(*_cells(figures, each))
    return result


def gain_line(figures: WorkloadFigures) -> str:
    """How far continuous gets, in a sentence; empty if it was not measured."""
    gain = figures.gain()
    if gain is None:
        return ""
    size, ratio, ceiling = gain
    return (
        f"continuous / static at batch size {size}, static's best: {ratio:.2f}; "
        f"its ceiling E[max of {size}]/E[mean] of these output lengths: {ceiling:.2f}"
    )


LEGEND = (
    "batch: slots at which the mode is fastest with all requests at once; tok/s, idle, no step, KV and long done are "
    "from that run. idle: slot time without a row in a step, no step: time in which nothing was computed, KV: token "
    "slots of the pool that held tokens, all in %; long done: long requests that had ended when the fastest mode had "
    "done everything. TTFT and E2E: from the scheduled arrival, in seconds, with requests that arrive at the same rate "
    "in every mode. static and client do the same when all come at once: where their tok/s differ, other work on the "
    "machine is to blame, and so it may be for every other difference of that size."
)


def markdown(workloads: Sequence[WorkloadFigures], surroundings: Sequence[str]) -> str:
    """The block of the performance page."""
    parts = ["  \n".join(surroundings)]
    for figures in workloads:
        rows = [list(COLUMNS), *(_cells(figures, each) for each in figures.modes)]
        parts += [f"**{_title(figures)}**", markdown_table(rows)]
        if line := gain_line(figures):
            parts.append(line[0].upper() + line[1:] + ".")
    return "\n\n".join(parts)


def document(workloads: Sequence[WorkloadFigures], facts: Mapping[str, object], *, is_whole: bool) -> dict[str, object]:
    """Everything that was measured; `facts` say of what and where."""
    return {
        **facts,
        "is_whole": is_whole,
        "workloads": [
            {
                **figures.workload.describe(),
                "offered_rate": figures.rate,
                "continuous_over_static": _gain_json(figures),
                "modes": [_mode_json(each) for each in figures.modes],
            }
            for figures in workloads
        ],
    }


def _gain_json(figures: WorkloadFigures) -> dict[str, float] | None:
    gain = figures.gain()
    return None if gain is None else dict(zip(("batch_size", "ratio", "ceiling"), gain, strict=True))


def _mode_json(each: ModeFigures) -> dict[str, object]:
    return {
        "mode": each.mode,
        "best_batch_size": each.best.setting.max_num_seqs,
        "long_done_when_fastest_ended": each.num_long_done,
        "saturated": [_trial_json(trial) for trial in each.saturated],
        "offered": None if each.offered is None else _trial_json(each.offered),
    }


def _trial_json(trial: Trial) -> dict[str, object]:
    figures: dict[str, object] = {
        "max_num_seqs": trial.setting.max_num_seqs,
        "request_rate": "inf" if trial.rate is None else trial.rate,
        "duration": round(trial.seconds, 4),
        "completed": sum(times.end_s is not None for times in trial.times),
        "total_output_tokens": trial.num_output,
        "output_throughput": round(trial.output_rate, 3),
        "idle_share": round(trial.idle_share, 4),
        "no_step_share": round(trial.no_step_share, 4),
        "kv_stored_share": round(trial.kv_stored_share, 4),
        "kv_referenced_share": round(trial.kv_referenced_share, 4),
        "preemptions": trial.num_preemptions,
    }
    figures |= Distribution.of(times.ttft_s for times in trial.times).to_json("ttft")
    figures |= Distribution.of(times.tpot_s for times in trial.times).to_json("tpot")
    figures |= Distribution.of(times.e2e_s for times in trial.times).to_json("e2el")
    figures["is_long"] = [times.is_long for times in trial.times]
    figures["scheduled"] = [round(times.scheduled_s, 4) for times in trial.times]
    figures["ends"] = [None if times.end_s is None else round(times.end_s, 4) for times in trial.times]
    return figures


def _title(figures: WorkloadFigures) -> str:
    workload = figures.workload
    text = f"{workload.name}: {len(workload.jobs)} requests, {workload.num_long} long"
    if figures.rate:
        text += f"; latencies at {figures.rate:.2f} requests/s"
    return f"{text} ({workload.note})" if workload.note else text


def _cells(figures: WorkloadFigures, each: ModeFigures) -> list[str]:
    ttft, e2e = each.latency(each.offered)
    return [
        each.mode,
        str(each.best.setting.max_num_seqs),
        f"{each.best.output_rate:.1f}",
        _pair(ttft),
        _pair(e2e),
        f"{100 * each.best.idle_share:.0f}",
        f"{100 * each.best.no_step_share:.1f}",
        f"{100 * each.best.kv_stored_share:.0f}",
        f"{each.num_long_done}/{figures.workload.num_long}",
    ]


def _pair(distribution: Distribution) -> str:
    p50, p99 = distribution.ms(50), distribution.ms(99)
    return "-" if p50 is None or p99 is None else f"{p50 / 1e3:.2f}/{p99 / 1e3:.2f}"
