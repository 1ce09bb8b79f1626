"""From trials to the figures of a mode: its best batch size, its latencies, and what theory allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb

from bench.load.summary import Distribution
from bench.modes.trial import Trial
from bench.modes.workloads import Workload

NOISE = 0.02
"""A batch size must be faster by more than this share to be preferred to a smaller one."""


def expected_max(values: Sequence[int], count: int) -> float:
    """The mean of the largest of `count` values drawn without replacement. Raises ValueError if it cannot be drawn.

    The i-th smallest of n is the largest in C(i - 1, count - 1) of the C(n, count) draws.
    """
    ordered = sorted(values)
    if not 1 <= count <= len(ordered):
        raise ValueError(f"{count} of {len(ordered)} values cannot be drawn")
    ways = sum(value * comb(index, count - 1) for index, value in enumerate(ordered))
    return ways / comb(len(ordered), count)


def ceiling(workload: Workload, batch_size: int) -> float:
    """E[max of a batch] / E[mean]: the most that continuous can gain over static at this batch size.

    As if a step took the same time whatever is in it.
    """
    lengths = [job.num_output for job in workload.jobs]
    return expected_max(lengths, min(batch_size, len(lengths))) / (sum(lengths) / len(lengths))


def best(trials: Iterable[Trial]) -> Trial | None:
    """The fastest of the trials of one mode, or a smaller batch that is as fast but for noise; None without trials."""
    chosen: Trial | None = None
    for trial in sorted(trials, key=lambda each: each.setting.max_num_seqs):
        if chosen is None or trial.output_rate > chosen.output_rate * (1 + NOISE):
            chosen = trial
    return chosen


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """One mode on one workload: all at once at every batch size, and at its best size with requests that arrive."""

    mode: str
    saturated: tuple[Trial, ...]
    best: Trial
    offered: Trial | None  # None: not measured
    num_long_done: int  # of the saturated trial at the best size, when the fastest mode had done everything

    def latency(self, trial: Trial | None) -> tuple[Distribution, Distribution]:
        """TTFT and E2E of a trial; empty without one."""
        times = trial.times if trial else []
        return Distribution.of(each.ttft_s for each in times), Distribution.of(each.e2e_s for each in times)


@dataclass(frozen=True, slots=True)
class WorkloadFigures:
    """All modes on one workload, and how far continuous gets beyond static."""

    workload: Workload
    modes: tuple[ModeFigures, ...]

    @property
    def rate(self) -> float | None:
        """Requests a second that were offered to all modes."""
        return next((each.offered.rate for each in self.modes if each.offered), None)

    def gain(self) -> tuple[int, float, float] | None:
        """Static's best batch size, continuous / static at that size, and the ceiling there; None: not measured."""
        by_mode = {each.mode: each for each in self.modes}
        if "static" not in by_mode or "continuous" not in by_mode:
            return None
        static = by_mode["static"].best
        size = static.setting.max_num_seqs
        same = next((each for each in by_mode["continuous"].saturated if each.setting.max_num_seqs == size), None)
        if same is None:
            return None
        return size, same.output_rate / static.output_rate, ceiling(self.workload, size)


def summarize(workload: Workload, trials: Sequence[Trial], modes: Sequence[str]) -> WorkloadFigures:
    """The figures of the modes that have trials on the workload."""
    own = [trial for trial in trials if trial.workload == workload.name]
    saturated = {mode: [each for each in own if each.setting.mode == mode and each.rate is None] for mode in modes}
    fastest = {mode: found for mode, each in saturated.items() if (found := best(each)) is not None}
    horizon_s = min((trial.seconds for trial in fastest.values()), default=0.0)
    figures = []
    for mode, chosen in fastest.items():
        offered = next((each for each in own if each.setting.mode == mode and each.rate is not None), None)
        done = chosen.num_long_done_at(horizon_s)
        figures.append(ModeFigures(mode, tuple(saturated[mode]), chosen, offered, done))
    return WorkloadFigures(workload, tuple(figures))
