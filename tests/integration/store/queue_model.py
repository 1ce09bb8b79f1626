"""The queue's rules in plain Python, by sorting and filtering: what the scripts must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.queueing.queue import Claim, QueueEntry, WorkerReport


@dataclass
class Request:
    """A live request."""

    entry: QueueEntry
    arrival: int
    resumed: bool = False
    attempt: int = 0
    claim: Claim | None = None
    overtaken: int = 0

    @property
    def place(self) -> tuple[int, bool, int]:
        return self.entry.band, not self.resumed, self.arrival


@dataclass
class Worker:
    """The stored numbers of a worker, and the claims not contained in them."""

    newest: WorkerReport
    is_forgotten: bool = False
    pending: dict[str, tuple[Claim, int]] = field(default_factory=dict)  # request id -> claim, blocks

    @property
    def slots(self) -> int:
        return 0 if self.is_forgotten else self.newest.usage.free_slots - len(self.pending)

    @property
    def blocks(self) -> int:
        return 0 if self.is_forgotten else self.newest.usage.free_blocks - sum(n for _, n in self.pending.values())

    def need(self, entry: QueueEntry) -> int:
        return -(-entry.num_tokens_needed // self.newest.limits.block_size)

    def can_hold(self, entry: QueueEntry) -> bool:
        return self.slots > 0 and self.need(entry) <= self.blocks


class QueueModel:
    """All of the queue's state but its clock: who is dead is told to it."""

    def __init__(self, *, max_overtakes: int, max_passed: int) -> None:
        self.max_overtakes, self.max_passed = max_overtakes, max_passed
        self.requests: dict[str, Request] = {}
        self.workers: dict[str, Worker] = {}
        self.dead: set[str] = set()
        self._arrivals = 0

    def enqueue(self, entry: QueueEntry) -> None:
        self._arrivals += 1
        self.requests[entry.request_id] = Request(entry, self._arrivals)

    def remove(self, request_id: str) -> None:
        self.drop_claim(self.requests.pop(request_id))

    def drop_claim(self, request: Request) -> None:
        if request.claim is not None:
            self.workers[request.claim.worker_id].pending.pop(request.claim.request_id, None)
            request.claim = None

    def undo_claim(self, request_id: str, *, resumed: bool) -> None:
        request = self.requests[request_id]
        self.drop_claim(request)
        request.resumed |= resumed

    def reap(self) -> None:
        for request_id in [it for it, request in self.requests.items() if request.entry.owner in self.dead]:
            self.remove(request_id)

    def take(self, report: WorkerReport) -> None:
        known = self.workers.get(report.worker_id)
        if known is None or report.epoch > known.newest.epoch:
            known = self.workers[report.worker_id] = Worker(report)
        elif report.epoch < known.newest.epoch:
            return
        elif report.usage.seq >= known.newest.usage.seq:
            known.newest, known.is_forgotten = report, False
        for ref in report.usage.accounted:
            if ref.request_id in known.pending and known.pending[ref.request_id][0].attempt == ref.attempt:
                del known.pending[ref.request_id]

    def dispatch(self, reports: Sequence[WorkerReport]) -> list[Claim]:
        for report in reports:
            self.take(report)
        models = sorted({request.entry.model for request in self.requests.values() if request.claim is None})
        return [claim for model in models for claim in self._dispatch_model(model)]

    def _dispatch_model(self, model: str) -> list[Claim]:
        workers = [worker for _, worker in sorted(self.workers.items()) if worker.newest.limits.model == model]
        fresh = [worker for worker in workers if not worker.is_forgotten]
        line = [request for request in self.requests.values() if request.entry.model == model and request.claim is None]
        kept: list[Worker] = []
        passed: list[Request] = []
        claims: list[Claim] = []
        for request in sorted(line, key=lambda it: it.place):
            if len(passed) >= self.max_passed:
                break
            if not any(worker.slots > 0 and worker.blocks > 0 for worker in fresh if worker not in kept):
                break
            if request.entry.owner in self.dead:
                self.remove(request.entry.request_id)
                continue
            able = [worker for worker in fresh if worker not in kept and worker.can_hold(request.entry)]
            if able:
                claims.append(self._claim(request, max(able, key=_least_loaded_first)))
                for head in passed:
                    head.overtaken += 1
                    if head.overtaken == self.max_overtakes:
                        self._keep_free(head, fresh, kept)
            elif any(worker.need(request.entry) <= worker.newest.limits.num_blocks for worker in fresh):
                if request.overtaken >= self.max_overtakes:
                    self._keep_free(request, fresh, kept)
                passed.append(request)
        return claims

    def _claim(self, request: Request, worker: Worker) -> Claim:
        entry = request.entry
        request.attempt += 1
        request.overtaken = 0
        report = worker.newest
        request.claim = Claim(entry.request_id, entry.owner, report.worker_id, report.epoch, request.attempt)
        worker.pending[entry.request_id] = request.claim, worker.need(entry)
        return request.claim

    def _keep_free(self, head: Request, fresh: Sequence[Worker], kept: list[Worker]) -> None:
        able = [it for it in fresh if it not in kept and it.need(head.entry) <= it.newest.limits.num_blocks]
        if able:
            kept.append(max(able, key=lambda worker: worker.blocks))


def _least_loaded_first(worker: Worker) -> tuple[float, int]:
    return worker.slots / worker.newest.limits.max_num_seqs, worker.blocks
