"""What the next step computes: every decode, then first chunks, then further chunks, under one budget."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from common.types import Band, FinishReason
from worker.cache.manager import CacheManager
from worker.cache.pool import IntegrityError
from worker.engine.batch import Batch, BatchRow
from worker.engine.config import SchedulerConfig
from worker.engine.modes import DEFAULT_MODE, MODES, Mode
from worker.engine.preemption import choose_victim, list_hand_backs, list_yielding
from worker.engine.request import Request, RequestState
from worker.engine.waiting import WaitingList

__all__ = ["Scheduler", "SchedulerConfig", "StepCounts"]

LOOK_BEHIND = 16
"""Waiting requests behind one that waits for memory that are looked at in a step."""

MAX_VICTIMS = 8
"""Long requests that make way for one newcomer at most."""


@dataclass(slots=True)
class StepCounts:
    """What happened while one step was scheduled."""

    admitted: list[Request] = field(default_factory=list)  # for the first time
    preempted: list[Request] = field(default_factory=list)
    first_chunk_waits_s: list[float] = field(default_factory=list)  # from arrival to this step
    num_decodes: int = 0  # rows of level 2 and 3
    num_long: int = 0  # of these, level 3
    num_hit_tokens: int = 0  # found in the prefix cache at admission
    num_yielded: int = 0  # of the preempted, those that made way for a newcomer
    num_overtakes: int = 0  # admissions before a request that waits for memory
    num_recomputed_tokens: int = 0  # computed before a preemption, and not found at readmission
    is_blocked: bool = False  # a waiting request found no memory


def _arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Owns the waiting and the running requests, their slots and, through the manager, their blocks.

    A request is promised the blocks of all its known tokens when it is admitted, so chunks never wait for blocks that
    others hold; it takes them as its chunks fill them. Only a decode that enters a new block can find none; then
    running requests are preempted until there is one.
    Requests are admitted by arrival, a preempted one at the place of its own; a few small ones may overtake one that
    waits for memory.
    """

    def __init__(self, manager: CacheManager, config: SchedulerConfig, mode: Mode | None = None) -> None:
        """`mode` decides how requests are batched; None is the default one."""
        mode = mode or MODES[DEFAULT_MODE]
        self.manager = manager
        self.config = config
        self.waiting = WaitingList()
        self.running: list[Request] = []  # by arrival
        self.step = StepCounts()
        self.num_steps = 0
        self.memory = mode.memory(manager, config)
        self.levels = mode.levels(config)
        self.budget = mode.budget(config)
        self._entry = mode.entry(config)
        self._departure = mode.departure()
        self._staying: list[Request] = []  # ended, and not gone
        self._long: list[Request] = []  # of level 3 in the present step, and running
        self._paused: list[Request] = []  # the same of paused ones
        self._now_s = 0.0  # when the present step began
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first, tables stay dense

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to schedule; requests that are paused are not."""
        return not (all(request.is_paused for request in self.running) and self.waiting.is_idle)

    @property
    def num_held_tokens(self) -> int:
        """Token slots of referenced blocks that hold a running request's token; what several share counts once."""
        unfilled = sum([len(request.block_ids) for request in self.running]) * self.manager.block_size
        unfilled -= sum([request.num_computed for request in self.running]) * self.manager.num_tables
        num_left = sum([len(request.block_ids) - request.num_shared_blocks for request in self._staying])
        return (self.manager.counts.referenced - num_left) * self.manager.block_size - unfilled

    @property
    def num_open_slots(self) -> int:
        """New requests that could be admitted by the number of slots, long requests making way for them; none while
        somebody waits for memory."""
        if self.step.is_blocked and self.waiting:
            return 0
        num_yielding = sum(
            request.band >= Band.NORMAL  # what most newcomers are of
            and request.state is RequestState.RUNNING
            and self.levels.may_yield(request, self.num_steps)
            for request in self._long
        )
        num_paused = sum(request.state is RequestState.RUNNING for request in self._paused)
        return max(0, len(self._free_slots) + num_yielding + num_paused - self.waiting.num_returning)

    def pause_s(self, now_s: float) -> float:
        """Seconds until a step can have work; 0 if it has already, or will not before a request comes."""
        return self._entry.pause_s(self.waiting, len(self.running), now_s)

    def add(self, request: Request) -> None:
        """Takes a new request; it waits for admission. Raises ValueError if it could only block those behind it."""
        if not self.manager.can_ever_fit(request):
            raise ValueError(f"{request} can never fit into {self.manager.pool.num_usable} blocks")
        self.waiting.add(request)

    def schedule(self, now_s: float = 0.0) -> Batch:
        """Decides the step that begins now; admits and preempts for it.

        An empty batch only if there is no request at all that is not paused, or the mode lets them gather.
        """
        self._now_s = now_s
        self.step = StepCounts()
        self.num_steps += 1
        rows, unfinished = self._ride()
        unfinished += self._admit(now_s)
        if self.step.num_yielded:
            rows = [row for row in rows if row.request.state is RequestState.RUNNING]
        unfinished.sort(key=_arrival)
        for request, num_new in self.levels.share(unfinished, self.budget):
            room = self.manager.cover(request, request.num_computed + num_new) - request.num_computed
            rows.append(BatchRow(request, min(num_new, room)))  # less room than tokens: only behind a window
            if request.started_s is None:
                request.started_s = now_s
                self.step.first_chunk_waits_s.append(now_s - request.arrived_s)
        batch = Batch(tuple(rows))
        self.memory.thrash.observe(batch.num_tokens, self.step.num_recomputed_tokens)
        return batch

    def list_hand_backs(self) -> list[Request]:
        """Who has waited so long for memory that another worker should go on with it."""
        return list_hand_backs(self.waiting.preempted, self.levels, self._now_s, self.config.hand_back_s)

    def observe(self, seconds: float) -> None:
        """Learns what the last step's batch took to execute."""
        self.budget.observe(seconds)

    def finish(self, requests: Sequence[Request]) -> None:
        """Takes requests out, wherever they are, and gives back their slots and blocks when they may leave."""
        ended = []
        for request in requests:
            if request.state is RequestState.RUNNING:
                ended.append(request)
            else:
                self.waiting.remove(request)
                self.manager.forget(request)
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.memory.observe_end(request)
            request.state = RequestState.FINISHED
        if not ended:
            return
        self.running = [request for request in self.running if request.state is RequestState.RUNNING]
        self._staying += ended
        leaving = self._departure.leaving(ended, len(self.running))
        for request in leaving:
            self._leave_slot(request)
        self._staying = [request for request in self._staying if request.slot != -1]

    def check_integrity(self) -> None:
        """Audits requests, slots and blocks. Raises IntegrityError with what is wrong."""
        waiting = list(self.waiting)
        self.manager.check_integrity([*self.running, *waiting, *self._staying])
        slots = [request.slot for request in (*self.running, *self._staying)] + self._free_slots
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise IntegrityError(f"slots in use and free are {sorted(slots)}")
        for queue, state in ((self.running, RequestState.RUNNING), (waiting, RequestState.WAITING)):
            arrivals = [request.arrival for request in queue]
            if arrivals != sorted(set(arrivals)):
                raise IntegrityError(f"{state.value} requests are out of order: {arrivals}")
            if any(request.state is not state for request in queue):
                raise IntegrityError(f"a request among the {state.value} ones is in another state")
        if any(request.block_ids or request.num_promised or request.slot != -1 for request in waiting):
            raise IntegrityError("a waiting request has blocks, promises or a slot")
        if any(request.num_computed for request in waiting):
            raise IntegrityError("a waiting request has computed tokens")
        for request in self.running:
            if not 0 <= request.num_computed < request.num_tokens:
                raise IntegrityError(f"{request.num_computed} of {request.num_tokens} tokens are computed")

    def preempt(self, request: Request) -> None:
        """Takes everything from a running request and lets it wait at the place of its arrival; its tokens stay."""
        request.num_lost = request.num_computed
        self.manager.keep(request, lambda start, count: self.budget.recompute_s(start, count, request.windows))
        self.running.remove(request)
        self._leave_slot(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        request.left_step = self.num_steps
        request.left_s = self._now_s
        self.step.preempted.append(request)
        self.waiting.add(request)

    def _ride(self) -> tuple[list[BatchRow], list[Request]]:
        """A row for every decode, each with a block to write to, and the requests that miss more than one token.

        Whoever is preempted for a block is not admitted by the same step: it gave one more than it finds.
        """
        self.manager.slide(self.running)
        while True:
            rows, unfinished, num_kv_tokens, needy = self._try_to_ride()
            if needy is None:
                break
            if len(self.running) == 1:
                raise IntegrityError("a lone request finds no block in a pool that its tokens fit into")
            self.preempt(choose_victim(self.running, needy, self.levels, self.num_steps))
        self.budget.open(len(rows), num_kv_tokens)
        self.step.num_decodes = len(rows)
        self.step.num_long = len(self._long)
        return rows, unfinished

    def _try_to_ride(self) -> tuple[list[BatchRow], list[Request], float, Request | None]:
        """Rows, unfinished requests and tokens attended to; or the first decode that finds no block."""
        rows: list[BatchRow] = []
        unfinished: list[Request] = []
        num_kv_tokens = 0.0
        self._long, self._paused = [], []
        manager, long_after = self.manager, self.levels.long_after_steps
        block_size, num_tables = manager.block_size, manager.num_tables
        for request in self.running:
            if request.is_paused:
                self._paused.append(request)
                continue
            num_tokens = len(request.token_ids)
            num_covered = len(request.block_ids) // num_tables * block_size
            if num_tokens - request.num_computed > 1:
                is_full = request.num_computed == num_covered
                if is_full and not manager.secure(request):  # only behind a window
                    return rows, unfinished, num_kv_tokens, request
                unfinished.append(request)
                continue
            if num_tokens > num_covered and not manager.grow(request):
                return rows, unfinished, num_kv_tokens, request
            rows.append(BatchRow(request, 1))
            num_kv_tokens += manager.num_seen(request, num_tokens) if request.windows else num_tokens
            if num_tokens - request.entry_tokens > long_after:
                self._long.append(request)
        return rows, unfinished, num_kv_tokens, None

    def _admit(self, now_s: float) -> list[Request]:
        """Admits waiting requests by arrival, and a few small ones before one that waits for memory; returns them.

        A step that had to preempt for a decode admits nobody: what the preempted one needs to return would be gone.
        """
        num_tokens = self._entry.num_tokens(self.waiting, len(self.running), self.budget, now_s)
        if self.step.preempted:
            self.step.is_blocked = True
            return []
        yielding = self._list_yielding()
        num_places = len(self._free_slots) + len(yielding) + len(self._paused)
        if not num_places:
            return []
        self.memory.begin_step(self.running)
        smallest_chunk = (self.config.min_chunk_tokens + 1) // 2
        waiting = self.waiting.first(num_places + self.waiting.num_returning + LOOK_BEHIND)
        # By arrival, but who is not urgent, a newcomer with time or a long request that left, lets the urgent pass.
        waiting.sort(key=lambda request: not self.levels.is_urgent(request, self.num_steps, now_s))
        admitted: list[Request] = []
        blocked: Request | None = None  # waits for memory
        num_looks = LOOK_BEHIND
        for request in waiting:
            if num_tokens <= 0 or not num_looks:
                break
            if blocked is not None:
                num_looks -= 1
                if not self.memory.may_overtake(request, blocked):
                    continue
            candidates = self._list_candidates(yielding, request, now_s, blocked)
            if not (self._free_slots or candidates):
                continue
            if not (self._make_way(request, candidates) and self.memory.admit(request)):
                blocked = blocked or request
                continue
            self._enter(request)
            admitted.append(request)
            num_tokens -= min(request.num_tokens - request.num_computed, smallest_chunk)
            if blocked is not None:
                blocked.num_overtaken += 1
                self.step.num_overtakes += 1
        self.step.is_blocked = blocked is not None
        return admitted

    def _list_yielding(self) -> list[Request]:
        """Who would make way for a newcomer now, first to go first; nobody while too much is computed twice."""
        if self.memory.thrash.ratio >= self.config.max_thrash:
            return []
        return list_yielding(self._long, self.levels, self.num_steps)

    def _list_candidates(
        self, yielding: Sequence[Request], request: Request, now_s: float, blocked: Request | None
    ) -> list[Request]:
        """Who would make way for this waiting request: everybody who is paused; of the others nobody of a higher band,
        nobody before it is urgent, and nobody for one that would overtake another without a first chunk."""
        running = RequestState.RUNNING
        paused = [other for other in reversed(self._paused) if other.state is running]
        if not yielding or not self.levels.is_urgent(request, self.num_steps, now_s):
            return paused
        if blocked is not None and blocked.started_s is None:
            return paused
        long = [other for other in yielding if other.band >= request.band and other.state is running]
        return paused + long[:MAX_VICTIMS]

    def _make_way(self, request: Request, candidates: Sequence[Request]) -> bool:
        """Whether a waiting request finds a slot and memory; as many candidates are preempted for it as that takes."""
        if self._free_slots and self.memory.fits(request):
            return True
        if not candidates:
            return False
        count = 1  # is enough where slots are short and memory is not
        if not self.memory.fits(request, candidates[:1]):
            if not self.memory.fits(request, candidates):
                return False
            counts = range(2, len(candidates))  # all of them are enough; maybe fewer are
            count = 2 + bisect_left(counts, True, key=lambda count: self.memory.fits(request, candidates[:count]))
        for victim in candidates[:count]:
            self.memory.leave(victim)
            self.preempt(victim)
        num_decoding = sum(not victim.is_paused for victim in candidates[:count])
        self.step.num_yielded += count
        self.step.num_long -= num_decoding
        self.step.num_decodes -= num_decoding
        return True

    def _enter(self, request: Request) -> None:
        """Gives a slot to a waiting request that has its blocks."""
        self.waiting.remove(request)
        request.slot = heappop(self._free_slots)
        request.state = RequestState.RUNNING
        request.admissions += 1
        request.entry_step = self.num_steps
        request.entry_tokens = request.num_tokens
        insort(self.running, request, key=_arrival)
        self.step.num_hit_tokens += request.num_computed
        if request.num_preemptions:
            request.num_waited_steps += self.num_steps - request.left_step
            self.step.num_recomputed_tokens += max(0, request.num_lost - request.num_computed)
        else:
            request.first_step = self.num_steps
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
            self.step.admitted.append(request)

    def _leave_slot(self, request: Request) -> None:
        heappush(self._free_slots, request.slot)
        request.slot = -1
        self.manager.free(request)
