"""Pictures of runs as PNG files: each function draws one figure from values that are given to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import log
from operator import itemgetter, methodcaller
from pathlib import Path
from statistics import median
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from bench.load.campaign import Run
from bench.load.goodput import GoodputRule
from bench.load.scrape import BLOCK_STATES
from bench.load.summary import (
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    Distribution,
    Latencies,
    cumulative_service,
    in_flight,
    output_rate,
)

DPI = 130
SHOWN_PERCENTILES = {50: "#1f77b4", 90: "#e08214", 99: "#c51b3d"}
METRIC_NAMES = {
    "ttft": "TTFT: first token - scheduled arrival",
    "tpot": "TPOT: time per output token after the first",
    "itl": "ITL: gap between deliveries",
    "e2el": "E2E: end - scheduled arrival",
}
_BLOCK_COLOURS = {"referenced": "#1f77b4", "cached": "#9ecae1", "swapping": "#e08214", "empty": "#eeeeee"}
_TIMELINE_POINTS = 400
_GREY = "#555555"
Place = Literal["best", "lower right", "upper left", ""]
"""Of a legend; empty: none."""
_PLAIN = FuncFormatter(lambda value, _position: f"{value:,.6g}")


def offered_axis(runs: Sequence[Run]) -> str:
    """What a sweep varied, for an axis."""
    if any(run.point.concurrency is not None for run in runs):
        return "concurrency (closed loop)"
    return "offered rate, requests/s"


def latency_by_load(runs: Sequence[Run], rule: GoodputRule) -> Figure:
    """TTFT, TPOT, ITL and E2E percentiles against what was offered; dashed: the goodput rule's limits."""
    figure, panels = _grid(f"Latency against {offered_axis(runs)}", 2, 2)
    limits = rule.to_json()
    for axes, (name, title) in zip(panels, METRIC_NAMES.items(), strict=True):
        for q, colour in SHOWN_PERCENTILES.items():
            _line(axes, runs, methodcaller("figure", f"p{q}_{name}_ms"), f"P{q}", colour)
        if f"{name}_ms" in limits:
            axes.axhline(limits[f"{name}_ms"], color=_GREY, linestyle="--", linewidth=1, label="goodput limit")
        _finish(axes, title, offered_axis(runs), "ms", is_log_y=_spans_decades(axes))
    return figure


def latency_distribution(run: Run) -> Figure:
    """The cumulative distribution of each latency in one run."""
    figure, panels = _grid(f"Distribution of latency, {run.point.label}", 2, 2)
    for axes, (name, distribution) in zip(panels, Latencies.of(run.records).items(), strict=True):
        _cumulative(axes, distribution)
        share = "share of gaps" if name == "itl" else "share of requests"
        _finish(axes, METRIC_NAMES[name], "ms", share, legend="lower right")
        axes.set_ylim(0, 1.02)
    return figure


def _cumulative(axes: Axes, distribution: Distribution) -> None:
    values = [value * 1e3 for value in distribution.ordered]
    if not values:
        _say(axes, "no completed request")
        return
    axes.plot(
        values, [(index + 1) / len(values) for index in range(len(values))], drawstyle="steps-post", color="#1f77b4"
    )
    for q, colour in SHOWN_PERCENTILES.items():
        value = distribution.ms(q)
        if value is not None:
            axes.axvline(
                value, color=colour, linestyle="--", linewidth=1, label=f"P{q} {value:,.{1 if value < 100 else 0}f} ms"
            )
    if values[0] > 0 and values[-1] > 30 * values[0]:
        axes.set_xscale("log")
        _plain_log_ticks(axes.xaxis)
        axes.tick_params(axis="x", labelsize=8)
    else:
        axes.xaxis.set_major_formatter(_PLAIN)


def throughput_by_concurrency(runs: Sequence[Run]) -> Figure:
    """Output tokens a second against the requests in flight, and what each of them gets."""
    figure, (left, right) = _grid("Throughput against concurrency", 1, 2)
    points = [
        (flight, rate, run)
        for run in runs
        if (flight := run.figure("mean_concurrent_requests")) and (rate := run.figure("output_throughput")) is not None
    ]
    points.sort(key=lambda point: point[0])
    for axes, values in (
        (left, [rate for _, rate, _ in points]),
        (right, [rate / flight for flight, rate, _ in points]),
    ):
        axes.plot([flight for flight, _, _ in points], values, "o-", color="#1f77b4")
        _label(axes, [(run, flight, value) for (flight, _, run), value in zip(points, values, strict=True)])
        axes.set_xlim(0, max((flight for flight, _, _ in points), default=1.0) * 1.1)
    _finish(left, "All requests together", "mean requests in flight", "output tokens/s", legend="")
    _finish(right, "For each request in flight", "mean requests in flight", "output tokens/s", legend="")
    return figure


def latency_by_throughput(runs: Sequence[Run]) -> Figure:
    """Latency against the throughput reached: beyond the knee more load buys only waiting."""
    figure, panels = _grid("Latency against throughput: the knee", 1, 2)
    for axes, name in zip(panels, ("ttft", "e2el"), strict=True):
        for q, colour in SHOWN_PERCENTILES.items():
            points = [
                (rate, latency, run)
                for run in sorted(runs, key=lambda run: run.point.offered or 0.0)
                if (rate := run.figure("output_throughput")) is not None
                and (latency := run.figure(f"p{q}_{name}_ms")) is not None
            ]
            axes.plot([each[0] for each in points], [each[1] for each in points], "o-", color=colour, label=f"P{q}")
            if q == max(SHOWN_PERCENTILES):
                _label(axes, [(run, rate, latency) for rate, latency, run in points])
        _finish(axes, METRIC_NAMES[name], "output tokens/s reached", "ms", is_log_y=_spans_decades(axes))
        axes.set_xlim(0, axes.dataLim.x1 * 1.1)
    return figure


def goodput(runs: Sequence[Run], rule: GoodputRule, capacity: float | None, target: float) -> Figure:
    """Requests a second that were completed and that were good; the shares of good, refused and failed ones."""
    figure, (left, right) = _grid(f"Goodput: {rule}", 1, 2)
    _line(left, runs, lambda run: run.figure("request_throughput"), "completed", "#9ecae1", width=5)
    _line(left, runs, lambda run: run.figure("request_goodput"), "good", "#2ca02c")
    _line(right, runs, lambda run: _percent(run.figure("slo_attainment")), "good, of all sent", "#2ca02c")
    _line(right, runs, lambda run: _percent(run.figure("rejection_rate")), "refused", "#e08214", width=3)
    _line(right, runs, _failed_percent, "failed otherwise", "#c51b3d")
    right.axhline(target * 100, color=_GREY, linestyle="--", linewidth=1, label=f"target {target:.0%}")
    if capacity is not None:
        for axes in (left, right):
            axes.axvline(capacity, color=_GREY, linestyle=":", label=f"capacity {capacity:.3g}/s")
    _finish(left, "Requests served", offered_axis(runs), "requests/s")
    _finish(right, "What became of them", offered_axis(runs), "%")
    right.set_ylim(-3, 103)
    return figure


def timeline(run: Run) -> Figure:
    """One run over time: requests, KV blocks, preemptions, tokens. Without endpoints only what the client saw."""
    samples = run.timeline.samples
    figure, panels = _grid(f"Timeline, {run.point.label}", 4, 1, shares_x=True, height=2.1)
    requests, blocks, preemptions, tokens = panels
    end = max(run.duration_s, samples[-1].at_s if samples else 0.0, 1e-3)
    times = [end * step / _TIMELINE_POINTS for step in range(_TIMELINE_POINTS + 1)]
    at = [sample.at_s for sample in samples]
    requests.plot(
        times,
        in_flight(run.records, times),
        color="#bbbbbb",
        label="due and not ended (client)",
        drawstyle="steps-post",
    )
    if samples:
        shown = {"running": ("#1f77b4", "workers"), "waiting": ("#e08214", "workers"), "queued": ("#c51b3d", "gateway")}
        for name, (colour, where) in shown.items():
            values = [getattr(each, name) for each in samples]
            requests.plot(at, values, color=colour, label=f"{name} ({where})", drawstyle="steps-post")
        blocks.stackplot(
            at,
            *([each.blocks[state] for each in samples] for state in BLOCK_STATES),
            labels=BLOCK_STATES,
            colors=[_BLOCK_COLOURS[state] for state in BLOCK_STATES],
            edgecolor="#999999",
            linewidth=0.4,
        )
        preemptions.step(
            at, [each.preemptions - samples[0].preemptions for each in samples], where="post", color="#c51b3d"
        )
    else:
        for axes in (blocks, preemptions):
            _say(axes, "no metrics endpoint was given")
    counts = output_rate(run.records, run.duration_s)
    edges = [float(second) for second in range(len(counts))] + [run.duration_s]
    tokens.stairs(
        [number / (later - earlier) for number, (earlier, later) in zip(counts, pairwise(edges), strict=True)],
        edges,
        fill=True,
        color="#8fcf8f",
    )
    _finish(requests, "Requests", "", "requests")
    _finish(blocks, "KV blocks by state", "", "blocks", legend="upper left")
    _finish(preemptions, "Preemptions since the start", "", "preemptions", legend="")
    _finish(tokens, "Output tokens received", "seconds since the start", "tokens/s", legend="")
    figure.align_ylabels(panels)
    preemptions.yaxis.set_major_locator(MaxNLocator(integer=True))
    preemptions.set_ylim(0, max(1.0, preemptions.get_ylim()[1]))
    tokens.set_xlim(0, end)
    return figure


def service(run: Run, tenants: Sequence[str]) -> Figure:
    """The cumulative service of each tenant: equal shares are parallel lines while all of them wait.

    A tenant's colour goes by its place among `tenants`, so that it is the same in all runs.
    """
    figure, (axes,) = _grid(f"Service by tenant, {run.point.label}", 1, 1, height=4.2)
    times = [run.duration_s * step / _TIMELINE_POINTS for step in range(_TIMELINE_POINTS + 1)]
    bands = {
        origin.sender.tenant_id: origin.sender.band for origin in (record.request.origin for record in run.records)
    }
    for tenant, curve in cumulative_service(run.records, times).items():
        band = bands[tenant]
        label = tenant if band is None else f"{tenant} ({band.name.lower()})"
        axes.plot(times, curve, label=label, color=f"C{tenants.index(tenant) % 10}")
    title = f"Tokens served ({PROMPT_WEIGHT} for a prompt token, {OUTPUT_WEIGHT} for an output token)"
    _finish(axes, title, "seconds since the start", "weighted tokens")
    axes.set_xlim(0, run.duration_s)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure as PNG and returns the path."""
    figure.savefig(path, dpi=DPI, format="png")
    return path


def _grid(
    title: str, rows: int, columns: int, *, shares_x: bool = False, height: float = 3.4
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(11, height * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=shares_x)
    return figure, [axes for row in panels for axes in row]


def _line(
    axes: Axes, runs: Iterable[Run], value: Callable[[Run], float | None], label: str, colour: str, width: float = 1.5
) -> None:
    """The median of repeats as a line, each run as a point."""
    by_offer: dict[float, list[float]] = {}
    for run in runs:
        found = value(run)
        if found is not None and run.point.offered is not None:
            by_offer.setdefault(run.point.offered, []).append(found)
    offers = sorted(by_offer)
    axes.plot(offers, [median(by_offer[each]) for each in offers], color=colour, label=label, linewidth=width)
    if offers and offers[-1] > 10 * offers[0]:
        axes.set_xscale("log")
    ticks = _far_apart(offers, is_log=axes.get_xscale() == "log")
    axes.set_xticks(ticks, [f"{each:.3g}" for each in ticks])
    axes.minorticks_off()
    for each in offers:
        axes.plot([each] * len(by_offer[each]), by_offer[each], "o", color=colour, markersize=4)


def _far_apart(ordered: Sequence[float], *, is_log: bool, least: float = 0.08) -> list[float]:
    """Of these values, the ends and what is not too near to another that was taken, as a share of the axis."""
    if len(ordered) < 2:
        return list(ordered)
    places = [log(each) for each in ordered] if is_log else list(ordered)
    span = places[-1] - places[0]
    taken = [0, len(places) - 1]
    for index in range(1, len(places) - 1):
        if all(abs(places[index] - places[other]) >= least * span for other in taken):
            taken.append(index)
    return [ordered[index] for index in sorted(taken)]


def _finish(
    axes: Axes, title: str, x_label: str, y_label: str, *, legend: Place = "best", is_log_y: bool = False
) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if is_log_y:
        axes.set_yscale("log")
        _plain_log_ticks(axes.yaxis)
    else:
        axes.set_ylim(0, max(axes.dataLim.y1, 1e-9) * 1.1)
        axes.yaxis.set_major_formatter(_PLAIN)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.85, edgecolor="none", loc=legend)


def _plain_log_ticks(axis: XAxis | YAxis) -> None:
    """Numbers as people write them, in place of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(_PLAIN)
    axis.set_minor_formatter(FuncFormatter(lambda _value, _position: ""))


def _spans_decades(axes: Axes) -> bool:
    """Whether a linear axis would press the smaller lines flat."""
    return bool(axes.dataLim.y1 > 30 * axes.dataLim.minposy)


def _label(axes: Axes, points: Iterable[tuple[Run, float, float]]) -> None:
    """Writes what was offered beside the points of runs, where there is room."""
    box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
    ordered = sorted(points, key=itemgetter(1))
    shown = _far_apart([x for _, x, _ in ordered], is_log=False)
    for run, x, y in ordered:
        if x in shown:
            shown.remove(x)
            axes.annotate(
                _short(run), (x, y), textcoords="offset points", xytext=(5, 6), fontsize=8, color=_GREY, bbox=box
            )


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_GREY)


def _short(run: Run) -> str:
    offered = run.point.offered
    if offered is None:
        return "trace"
    return f"{offered:.3g}" if run.point.concurrency is not None else f"{offered:.3g}/s"


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _failed_percent(run: Run) -> float | None:
    settled = len(run.records) - (run.figure("interrupted") or 0)
    failed = (run.figure("failed") or 0) - (run.figure("refused") or 0)
    return failed / settled * 100 if settled else None
