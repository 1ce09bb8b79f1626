"""The queue's rules in plain Python, by sorting and filtering: what the scripts must agree with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.types import Band
from gateway.queueing.queue import Claim, Flow, Place, QueueEntry, WorkerReport
from gateway.store.redis_queue import QueueSettings

COUNTER_UNIT = 100
RANKS = {Place.FIRST: -1, Place.LAST: 1}


@dataclass
class Request:
    """A live request."""

    entry: QueueEntry
    arrival: int
    turn: int
    rank: int = 0
    attempt: int = 0
    claim: Claim | None = None
    overtaken: int = 0
    input_tokens: int = 0
    charged: int = 0
    charged_tokens: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.rank, self.arrival


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

    def can_hold(self, blocks: int, headroom: int = 0) -> bool:
        """With so many thousandths of the worker left free."""
        limits = self.newest.limits
        kept_slots = min((limits.max_num_seqs * headroom + 500) // 1000, limits.max_num_seqs - 1)
        kept_blocks = min((limits.num_blocks * headroom + 500) // 1000, max(limits.num_blocks - blocks, 0))
        return self.slots > kept_slots and self.blocks >= blocks + kept_blocks


@dataclass
class Served:
    """What a band of a model has been served."""

    virtual: int = 0
    running: int = 0
    owed: int = 0  # thousandths of weighted tokens


@dataclass
class Walk:
    """One model in one dispatch."""

    model: str
    fresh: list[Worker]
    kept: list[Worker] = field(default_factory=list)
    passed: list[Request] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)  # neither claimed nor removed
    claims: list[Claim] = field(default_factory=list)
    num_misfits: int = 0  # of the passed, those that reached a worker with credit when it was their turn

    def able(self, blocks: int, headroom: int = 0) -> list[Worker]:
        return [it for it in self.fresh if it not in self.kept and it.can_hold(blocks, headroom)]


class QueueModel:
    """All of the queue's state but its clock: who is dead is told to it, and a wait is long at once or never."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.headrooms = {
            Band.HIGH: 0,
            Band.NORMAL: round(settings.normal_headroom * 1000),
            Band.LOW: round(settings.low_headroom * 1000),
        }
        self.shares = {Band.NORMAL: settings.normal_share * 1000, Band.LOW: settings.low_share * 1000}
        self.requests: dict[str, Request] = {}
        self.workers: dict[str, Worker] = {}
        self.dead: set[str] = set()
        self.reached: dict[str, Collection[str]] = {}  # by gateway, if it has said so
        self.counters: dict[Flow, int] = {}
        self.weights: dict[Flow, int] = {}
        self.served: defaultdict[tuple[str, Band], Served] = defaultdict(Served)
        self.since_longest: defaultdict[str, int] = defaultdict(int)
        self.num_out_of_turn = 0
        self._sequence = 0

    def enqueue(self, entry: QueueEntry) -> None:
        flow = entry.flow
        self.weights[flow] = entry.weight
        if not self.waiting(flow):
            others = [self.counters[it.entry.flow] for it in self.band(flow.model, flow.band)]
            least = min(others) if others else self.served[flow.model, flow.band].virtual
            self.counters[flow] = max(self.counters.get(flow, 0), least)
        turn = self._next()
        rank = -1 if entry.is_resumed else 0
        self.requests[entry.request_id] = Request(entry, turn, turn, rank, input_tokens=entry.num_input_tokens)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def band(self, model: str, band: Band) -> list[Request]:
        """The waiting requests of a band."""
        requests = self.requests.values()
        return [it for it in requests if it.claim is None and (it.entry.model, it.entry.band) == (model, band)]

    def waiting(self, flow: Flow) -> list[Request]:
        return [request for request in self.band(flow.model, flow.band) if request.entry.flow == flow]

    def remove(self, request_id: str) -> None:
        self.drop_claim(self.requests.pop(request_id))

    def drop_claim(self, request: Request) -> None:
        if request.claim is not None:
            self.workers[request.claim.worker_id].pending.pop(request.claim.request_id, None)
            request.claim = None
            self.served[request.entry.model, request.entry.band].running -= 1

    def undo_claim(self, request_id: str, place: Place, renewed: QueueEntry | None = None) -> None:
        request = self.requests[request_id]
        flow = request.entry.flow
        if place is Place.SAME and request.rank == 0:
            self.counters[flow] -= request.charged
            self.note_service(flow.model, flow.band, -request.charged_tokens)
            request.charged = request.charged_tokens = 0
        elif place is not Place.SAME:
            request.rank, request.turn = RANKS[place], self._next()
        self.drop_claim(request)
        if renewed is not None:
            request.entry, request.input_tokens = renewed, renewed.num_input_tokens

    def reap(self) -> None:
        for request_id in [it for it, request in self.requests.items() if request.entry.owner in self.dead]:
            self.remove(request_id)
        for gateway in self.dead:
            self.reached.pop(gateway, None)

    def reaches(self, owner: str, worker: Worker) -> bool:
        return owner not in self.reached or worker.newest.worker_id in self.reached[owner]

    # Service

    def count(self, flow: Flow, tokens: int) -> int:
        amount = (2 * tokens * COUNTER_UNIT + self.weights[flow]) // (2 * self.weights[flow])
        self.counters[flow] += amount
        return amount

    def charge(self, output_tokens: Mapping[Flow, int]) -> None:
        for flow, num_tokens in output_tokens.items():
            tokens = num_tokens * self.settings.output_weight
            if flow in self.counters:
                self.count(flow, tokens)
            self.note_service(flow.model, flow.band, tokens)

    def contended(self, model: str) -> Iterator[tuple[Band, bool]]:
        """Bands below the first that waits, and whether they wait too."""
        waits = [bool(self.band(model, band)) for band in Band]
        return ((band, waits[i]) for i, band in enumerate(Band) if any(waits[:i]))

    def note_service(self, model: str, served_band: Band, tokens: int) -> None:
        for band, waits in self.contended(model):
            served = self.served[model, band]
            served.owed += round(tokens * self.shares[band]) * waits - tokens * 1000 * (band is served_band)

    # Dispatch

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
        walk = Walk(model, [worker for worker in workers if not worker.is_forgotten])
        before = {band: self.served[model, band].owed for band in Band}
        if walk.able(1):
            self._settle_shares(model)
        while walk.able(1) and walk.num_misfits < self.settings.max_passed:
            request, by_wait, headroom = self._pick(walk)
            if request is None:
                break
            if request.entry.owner in self.dead:
                self.remove(request.entry.request_id)
            else:
                self._consider(request, by_wait, headroom, walk)
        if not walk.claims:
            for band in Band:
                self.served[model, band].owed = before[band]
        return walk.claims

    def _settle_shares(self, model: str) -> None:
        most = self.settings.max_owed_tokens * 1000
        for band in Band:
            served = self.served[model, band]
            served.owed = max(min(served.owed, most if self.band(model, band) else 0), -most)

    def _next_of_band(self, walk: Walk, band: Band) -> Request | None:
        line = [request for request in self.band(walk.model, band) if request not in walk.seen]
        return min(line, key=lambda it: (self.counters[it.entry.flow], it.entry.tenant, it.place), default=None)

    def _pick(self, walk: Walk) -> tuple[Request | None, bool, int]:
        """The next request, whether its wait chose it, and what it has to leave free."""
        if self.since_longest[walk.model] >= self.settings.claims_per_long_wait - 1 and self.settings.long_wait_s == 0:
            waiting = [request for band in Band for request in self.band(walk.model, band)]
            longest = min(waiting, key=lambda it: it.turn, default=None)
            if longest is not None and longest not in walk.seen:
                return longest, True, 0
        num_slots = sum(worker.newest.limits.max_num_seqs for worker in walk.fresh)
        for band, waits in self.contended(walk.model):
            served, request = self.served[walk.model, band], self._next_of_band(walk, band)
            max_running = max(int(self.shares[band] * num_slots / 1000), 1)
            if waits and request is not None and served.running < max_running:
                output_tokens = max(request.entry.num_tokens_needed - request.input_tokens, 0)
                tokens = request.input_tokens * self.settings.input_weight + output_tokens * self.settings.output_weight
                if served.owed > 0 and served.owed >= min(tokens, self.settings.max_owed_tokens) * 1000:
                    self.num_out_of_turn += 1
                    return request, False, 0
        for band, headroom in self.headrooms.items():
            request = self._next_of_band(walk, band)
            if request is not None and walk.able(1, headroom):
                return request, False, headroom
        return None, False, 0

    def _consider(self, request: Request, by_wait: bool, headroom: int, walk: Walk) -> None:
        reached = [it for it in walk.able(1) if self.reaches(request.entry.owner, it)]
        able = [it for it in reached if it.can_hold(it.need(request.entry), headroom)]
        if able:
            self._note_choice(request, by_wait)
            chosen = max(able, key=lambda it: (self._score(it, request), it.blocks))
            walk.claims.append(self._claim(request, chosen))
            for head in walk.passed:
                if not self.reaches(head.entry.owner, chosen):
                    continue
                head.overtaken += 1
                if head.overtaken == self.settings.max_overtakes:
                    self._keep_free(head, walk)
            return
        walk.seen.append(request)
        if any(self._can_ever_hold(worker, request) for worker in walk.fresh):
            if request.overtaken >= self.settings.max_overtakes:
                self._keep_free(request, walk)
            walk.passed.append(request)
            walk.num_misfits += bool(reached)

    def _can_ever_hold(self, worker: Worker, request: Request) -> bool:
        fits = worker.need(request.entry) <= worker.newest.limits.num_blocks
        return fits and self.reaches(request.entry.owner, worker)

    def _score(self, worker: Worker, request: Request) -> float:
        limits = worker.newest.limits
        free = min(worker.slots / limits.max_num_seqs, worker.blocks / limits.num_blocks)
        cached = request.entry.cached_blocks.get(worker.newest.worker_id, 0)
        weight = round(self.settings.prefix_weight * 1000) / 1000
        return free + weight * min(cached * limits.block_size / request.input_tokens, 1)

    def _note_choice(self, request: Request, by_wait: bool) -> None:
        flow = request.entry.flow
        if by_wait:
            self.since_longest[flow.model] = 0
        else:
            self.since_longest[flow.model] += 1
            served = self.served[flow.model, flow.band]
            served.virtual = max(served.virtual, self.counters[flow])
        if request.charged == 0:
            request.charged_tokens = request.input_tokens * self.settings.input_weight
            request.charged = self.count(flow, request.charged_tokens)
            self.note_service(flow.model, flow.band, request.charged_tokens)

    def _claim(self, request: Request, worker: Worker) -> Claim:
        entry = request.entry
        request.attempt += 1
        request.overtaken = 0
        report = worker.newest
        request.claim = Claim(entry.request_id, entry.owner, report.worker_id, report.epoch, request.attempt)
        worker.pending[entry.request_id] = request.claim, worker.need(entry)
        self.served[entry.model, entry.band].running += 1
        return request.claim

    def _keep_free(self, head: Request, walk: Walk) -> None:
        able = [it for it in walk.fresh if it not in walk.kept and self._can_ever_hold(it, head)]
        if able:
            walk.kept.append(max(able, key=lambda worker: worker.blocks))
