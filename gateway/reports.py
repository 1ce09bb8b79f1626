"""Workers' reports on their way to the dispatch script: the latest numbers, and every claim they account for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from common.types import BlockUsage, ClaimRef, ModelLimits
from gateway.queueing.queue import WorkerReport


class PendingReports:
    """What no run of the script has taken yet. A report that a failed run took comes back by `give_back`."""

    def __init__(self) -> None:
        self._by_worker: dict[str, WorkerReport] = {}

    def __len__(self) -> int:
        return len(self._by_worker)

    def add(self, worker_id: str, epoch: int, limits: ModelLimits, usage: BlockUsage) -> None:
        """Takes in new numbers; accounted claims of untaken older ones of the same start are kept."""
        self._merge(WorkerReport(worker_id, epoch, limits, usage))

    def take(self) -> list[WorkerReport]:
        """All pending reports, which are no longer pending."""
        reports = list(self._by_worker.values())
        self._by_worker.clear()
        return reports

    def give_back(self, reports: Iterable[WorkerReport]) -> None:
        """Makes taken reports pending again, under whatever came since."""
        for report in reports:
            self._merge(report)

    def forget(self, worker_id: str, epoch: int) -> None:
        """Drops the report of a start that is over."""
        pending = self._by_worker.get(worker_id)
        if pending is not None and pending.epoch == epoch:
            del self._by_worker[worker_id]

    def _merge(self, report: WorkerReport) -> None:
        pending = self._by_worker.get(report.worker_id)
        if pending is None or pending.epoch < report.epoch:
            self._by_worker[report.worker_id] = report
        elif pending.epoch == report.epoch:
            newer, older = (report, pending) if report.usage.seq >= pending.usage.seq else (pending, report)
            if older.usage.accounted:
                accounted = _union(older.usage.accounted, newer.usage.accounted)
                newer = replace(newer, usage=replace(newer.usage, accounted=accounted))
            self._by_worker[report.worker_id] = newer


def _union(first: Iterable[ClaimRef], second: Iterable[ClaimRef]) -> tuple[ClaimRef, ...]:
    return tuple(dict.fromkeys((*first, *second)))
