"""One picture of all modes: throughput by batch size, latencies, idle time and memory, a row for each workload."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.modes.summary import ModeFigures, WorkloadFigures

COLOURS = {
    "static": "#7f7f7f",
    "client": "#bcbd22",
    "continuous": "#1f77b4",
    "paged": "#9467bd",
    "full": "#2ca02c",
}


def overview(workloads: Sequence[WorkloadFigures]) -> Figure:
    """Four panels for each workload. Modes without a colour of their own are drawn black."""
    figure = Figure(figsize=(15, 3.6 * len(workloads) + 0.5), layout="constrained")
    figure.suptitle("Batching modes, each at its own best batch size under the same memory", fontweight="bold")
    panels = figure.subplots(len(workloads), 4, squeeze=False)
    for row, figures in zip(panels, workloads, strict=True):
        _throughput(row[0], figures)
        _latency(row[1], figures, "TTFT", 0)
        _latency(row[2], figures, "E2E", 1)
        _shares(row[3], figures)
    return figure


def _throughput(axes: Axes, figures: WorkloadFigures) -> None:
    sizes = sorted({trial.setting.max_num_seqs for each in figures.modes for trial in each.saturated})
    if len(sizes) > 1:
        _throughput_by_size(axes, figures, sizes)
        return
    for position, mode in enumerate(figures.modes):
        axes.bar(position, mode.best.output_rate, 0.6, color=_colour(mode))
    axes.set_xticks(range(len(figures.modes)), [mode.mode for mode in figures.modes], fontsize=8)
    _finish(axes, f"{figures.workload.name}: output tokens/s", f"max_num_seqs {sizes[0]}")


def _throughput_by_size(axes: Axes, figures: WorkloadFigures, all_sizes: Sequence[int]) -> None:
    for each in figures.modes:
        sizes = [trial.setting.max_num_seqs for trial in each.saturated]
        rates = [trial.output_rate for trial in each.saturated]
        axes.plot(sizes, rates, "o-", color=_colour(each), label=each.mode, markersize=4)
        axes.plot(each.best.setting.max_num_seqs, each.best.output_rate, "*", color=_colour(each), markersize=13)
    axes.set_xscale("log")
    axes.set_xticks(all_sizes, [str(size) for size in all_sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * max(trial.output_rate for each in figures.modes for trial in each.saturated))
    axes.legend(fontsize=8, framealpha=0.85, edgecolor="none")
    _finish(axes, f"{figures.workload.name}: output tokens/s", "max_num_seqs (star: the best)")


def _latency(axes: Axes, figures: WorkloadFigures, name: str, index: int) -> None:
    offered = [each for each in figures.modes if each.offered is not None]
    for position, each in enumerate(offered):
        distribution = each.latency(each.offered)[index]
        for q, shift, alpha in ((50, -0.2, 0.55), (99, 0.2, 1.0)):
            value = distribution.ms(q)
            if value is not None:
                axes.bar(position + shift, value / 1e3, 0.38, color=_colour(each), alpha=alpha)
                axes.annotate(f"P{q}", (position + shift, value / 1e3), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(offered)), [each.mode for each in offered], fontsize=8)
    rate = f"{figures.rate:.2f} requests/s" if figures.rate else "not measured"
    _finish(axes, f"{name}, seconds, at {rate}", "")


def _shares(axes: Axes, figures: WorkloadFigures) -> None:
    for position, each in enumerate(figures.modes):
        for value, shift, alpha in ((each.best.idle_share, -0.2, 0.55), (each.best.kv_stored_share, 0.2, 1.0)):
            axes.bar(position + shift, 100 * value, 0.38, color=_colour(each), alpha=alpha)
    axes.set_xticks(range(len(figures.modes)), [each.mode for each in figures.modes], fontsize=8)
    axes.set_ylim(0, 100)
    _finish(axes, "pale: idle slots; dark: KV pool in use (%)", "")


def _finish(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label, fontsize=9)
    axes.grid(visible=True, axis="y", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colour(figures: ModeFigures) -> str:
    return COLOURS.get(figures.mode, "black")
