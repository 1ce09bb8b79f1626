"""What is seen while the modes are measured: a bar on a terminal, and a line for each trial that is over."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.modes.campaign import Watcher
from bench.modes.trial import Setting, Trial
from bench.modes.workloads import Workload


class Display(Watcher):
    """Shows a campaign; a context manager."""

    def __init__(self, console: Console, num_trials: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._all = self._progress.add_task("trials", total=num_trials)
        self._one = self._progress.add_task("", total=1)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, workload: Workload, setting: Setting, rate: float | None) -> None:
        """See Watcher."""
        self._progress.reset(self._one, total=len(workload.jobs), description=_label(workload.name, setting, rate))

    def advance(self, num_ended: int) -> None:
        """See Watcher."""
        self._progress.update(self._one, completed=num_ended)

    def end(self, trial: Trial) -> None:
        """See Watcher."""
        self._progress.advance(self._all)
        self._console.print(
            f"{_label(trial.workload, trial.setting, trial.rate)}: {trial.output_rate:.1f} tok/s in "
            f"{trial.seconds:.1f} s, idle {100 * trial.idle_share:.0f} %",
            highlight=False,
            markup=False,
        )


def _label(workload: str, setting: Setting, rate: float | None) -> str:
    return f"{workload}, {setting}, {'all at once' if rate is None else f'{rate:.2f} requests/s'}"
