"""Workers' reports on their way to the dispatch script: the latest numbers, and every claim they account for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from common.types import BlockUsage, ModelLimits
from gateway.queueing.queue import WorkerReport


class PendingReports:
    """What no run of the script has taken yet. A report that a failed run took comes back by `give_back`."""

    def __init__(self) -> None:
        self._by_worker: dict[str, _Pending] = {}

    def __len__(self) -> int:
        return len(self._by_worker)

    def add(self, worker_id: str, epoch: int, limits: ModelLimits, usage: BlockUsage) -> None:
        """Takes in new numbers; accounted claims of untaken older ones of the same start are kept."""
        self._merge(WorkerReport(worker_id, epoch, limits, usage))

    def take(self) -> list[WorkerReport]:
        """All pending reports, which are no longer pending."""
        reports = [pending.whole() for pending in self._by_worker.values()]
        self._by_worker.clear()
        return reports

    def give_back(self, reports: Iterable[WorkerReport]) -> None:
        """Makes taken reports pending again, under whatever came since."""
        for report in reports:
            self._merge(report)

    def forget(self, worker_id: str, epoch: int) -> None:
        """Drops the report of a start that is over."""
        pending = self._by_worker.get(worker_id)
        if pending is not None and pending.latest.epoch == epoch:
            del self._by_worker[worker_id]

    def _merge(self, report: WorkerReport) -> None:
        pending = self._by_worker.get(report.worker_id)
        if pending is None or pending.latest.epoch < report.epoch:
            self._by_worker[report.worker_id] = _Pending(report)
        elif pending.latest.epoch == report.epoch:
            pending.merge(report)


class _Pending:
    """Reports of one start of a worker."""

    def __init__(self, report: WorkerReport) -> None:
        self.latest = report
        self._accounted = dict.fromkeys(report.usage.accounted)  # by all of them

    def merge(self, report: WorkerReport) -> None:
        accounted = dict.fromkeys(report.usage.accounted)
        if report.usage.seq >= self.latest.usage.seq:
            self.latest = report
            self._accounted |= accounted
        else:
            self._accounted = accounted | self._accounted

    def whole(self) -> WorkerReport:
        latest = self.latest
        accounted = tuple(self._accounted)
        if accounted == latest.usage.accounted:
            return latest
        return replace(latest, usage=replace(latest.usage, accounted=accounted))
