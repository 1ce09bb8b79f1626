"""Which trials are run, in which order: every batch size of every mode, then the best one with requests that arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.levels import Machine
from bench.modes.summary import best
from bench.modes.trial import Server, Setting, Trial
from bench.modes.workloads import Workload
from common.types import ModelLimits

OFFERED_LOAD = 0.7
"""Arrivals, as a share of what the fastest mode can do: modes that can do less than this build up a queue."""


class Watcher:
    """Told of a campaign's progress; this one ignores it."""

    def begin(self, workload: Workload, setting: Setting, rate: float | None) -> None:
        """A trial begins."""

    def advance(self, num_ended: int) -> None:
        """So many of its requests have ended."""

    def end(self, trial: Trial) -> None:
        """It is over."""


@dataclass(slots=True)
class Campaign:
    """Runs trials one after the other; `trials` holds those that are over, also if a run is interrupted."""

    make_machine: Callable[[], Machine]
    limits: ModelLimits
    modes: Sequence[str]
    batch_sizes: Sequence[int]
    watcher: Watcher = field(default_factory=Watcher)
    trials: list[Trial] = field(default_factory=list)

    @property
    def trials_per_workload(self) -> int:
        """How many trials a workload takes."""
        return len(self.modes) * (len(self.batch_sizes) + 1)

    def run(self, workload: Workload) -> None:
        """All trials of one workload. Raises TrialError."""
        fastest = [self._find_best(workload, mode) for mode in self.modes]
        capacity = max(trial.output_rate for trial in fastest) / (workload.num_output / len(workload.jobs))
        for trial in fastest:
            self._try(workload, trial.setting, OFFERED_LOAD * capacity)

    def _find_best(self, workload: Workload, mode: str) -> Trial:
        trials = [self._try(workload, Setting(mode, size), None) for size in self.batch_sizes]
        found = best(trials)
        assert found is not None
        return found

    def _try(self, workload: Workload, setting: Setting, rate: float | None) -> Trial:
        self.watcher.begin(workload, setting, rate)
        trial = Server(self.make_machine(), setting, workload, self.limits).serve(rate, self.watcher.advance)
        self.trials.append(trial)
        self.watcher.end(trial)
        return trial
