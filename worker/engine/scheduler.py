"""What the next step computes: every decode, then first chunks, then further chunks, under one token budget."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from heapq import heappop, heappush

from worker.cache.manager import CacheManager
from worker.cache.pool import IntegrityError
from worker.engine.batch import Batch, BatchRow
from worker.engine.preemption import choose_victim
from worker.engine.request import Request, RequestState


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step. Raises ValueError if a bound would keep a request from ever advancing."""

    max_num_seqs: int  # running requests, each in a slot of its own
    max_num_batched_tokens: int  # tokens computed per step; more lengthen every running request's gap
    max_chunk_tokens: int  # tokens of one request per step; less leaves more of the budget to others
    watermark_blocks: int = 0  # kept free at admission while something runs; more means fewer preemptions

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.watermark_blocks < 0:
            raise ValueError(f"watermark_blocks is {self.watermark_blocks}, at least 0 is needed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; every running request decodes in every "
                f"step, which needs at least max_num_seqs = {self.max_num_seqs}"
            )


@dataclass(slots=True)
class StepCounts:
    """What happened while one step was scheduled."""

    admitted: list[Request] = field(default_factory=list)  # for the first time
    num_hit_tokens: int = 0  # found in the prefix cache at admission
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # computed before a preemption, and not found at readmission


def _arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Owns the waiting and the running requests, their slots and, through the manager, their blocks.

    A request gets the blocks of all its known tokens when it is admitted, so chunks never wait for blocks that others
    hold. Only a decode that enters a new block can find none; then running requests are preempted until there is one.
    Waiting requests are admitted strictly by arrival; a preempted one keeps its arrival and so its place.
    """

    def __init__(self, manager: CacheManager, config: SchedulerConfig) -> None:
        self.manager = manager
        self.config = config
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.num_preempted_waiting = 0
        self.step = StepCounts()
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first, tables stay dense

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to schedule."""
        return bool(self.running or self.waiting)

    @property
    def num_open_slots(self) -> int:
        """New requests that could be admitted by the number of slots; none while a preempted one waits to return."""
        return 0 if self.num_preempted_waiting else len(self._free_slots)

    def add(self, request: Request) -> None:
        """Takes a new request; it waits for admission. Raises ValueError if it could only block those behind it."""
        if not self.manager.can_ever_fit(request.num_tokens):
            raise ValueError(f"{request} can never fit into {self.manager.max_tokens} tokens' blocks")
        insort(self.waiting, request, key=_arrival)

    def schedule(self) -> Batch:
        """Decides the next step, admits and preempts for it. An empty batch only if there is no request at all."""
        self.step = StepCounts()
        self._make_room_for_decodes()
        budget = self.config.max_num_batched_tokens
        rows: list[BatchRow] = []
        unfinished: list[Request] = []  # more than one token is missing: a prompt, or a recompute
        for request in self.running:
            if len(request.token_ids) - request.num_computed == 1:
                rows.append(BatchRow(request, 1))
            else:
                unfinished.append(request)
        budget -= len(rows)
        budget = self._admit(rows, budget)
        for request in unfinished:
            if budget == 0:
                break
            budget = self._add_chunk(rows, request, budget)
        return Batch(tuple(rows))

    def finish(self, requests: list[Request]) -> None:
        """Takes requests out, wherever they are, and gives back their slots and blocks."""
        for request in requests:
            if request.state is RequestState.RUNNING:
                self._leave_slot(request)
            elif request.num_preemptions:
                self.num_preempted_waiting -= 1
            request.state = RequestState.FINISHED
        self.running = [request for request in self.running if request.state is RequestState.RUNNING]
        self.waiting = [request for request in self.waiting if request.state is RequestState.WAITING]

    def check_integrity(self) -> None:
        """Audits requests, slots and blocks. Raises IntegrityError with what is wrong."""
        self.manager.check_integrity([*self.running, *self.waiting])
        slots = [request.slot for request in self.running] + self._free_slots
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise IntegrityError(f"slots in use and free are {sorted(slots)}")
        for queue, state in ((self.running, RequestState.RUNNING), (self.waiting, RequestState.WAITING)):
            arrivals = [request.arrival for request in queue]
            if arrivals != sorted(set(arrivals)):
                raise IntegrityError(f"{state.value} requests are out of order: {arrivals}")
            if any(request.state is not state for request in queue):
                raise IntegrityError(f"a request among the {state.value} ones is in another state")
        if any(request.block_ids or request.num_computed or request.slot != -1 for request in self.waiting):
            raise IntegrityError("a waiting request has blocks, computed tokens or a slot")
        if self.num_preempted_waiting != sum(request.num_preemptions > 0 for request in self.waiting):
            raise IntegrityError(f"{self.num_preempted_waiting} waiting requests are counted as preempted")
        for request in self.running:
            if not 0 <= request.num_computed < request.num_tokens:
                raise IntegrityError(f"{request.num_computed} of {request.num_tokens} tokens are computed")

    def _make_room_for_decodes(self) -> None:
        """Gives a block to every decode that enters a new one, and preempts until there is one.

        Who is preempted here is not admitted by the same step: the blocks it gave are fewer by the one they were for.
        """
        block_size = self.manager.block_size
        for request in list(self.running):
            while (
                len(request.token_ids) > len(request.block_ids) * block_size
                and request.state is RequestState.RUNNING
                and not self.manager.grow(request)
            ):
                if len(self.running) == 1:
                    raise IntegrityError("a lone request finds no block in a pool that its tokens fit into")
                self.preempt(choose_victim(self.running))

    def preempt(self, request: Request) -> None:
        """Takes everything from a running request and lets it wait at the place of its arrival; its tokens stay."""
        request.num_lost = request.num_computed
        self.running.remove(request)
        self._leave_slot(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.step.num_preemptions += 1
        self.num_preempted_waiting += 1
        insort(self.waiting, request, key=_arrival)

    def _leave_slot(self, request: Request) -> None:
        heappush(self._free_slots, request.slot)
        request.slot = -1
        self.manager.free(request)

    def _admit(self, rows: list[BatchRow], budget: int) -> int:
        """Admits waiting requests, each with its first chunk, until one does not fit; returns the budget left."""
        num_admitted = 0
        for request in self.waiting:
            if not budget or not self._free_slots:
                break
            if not self.manager.admit(request, headroom=self._headroom(request)):
                break  # nobody overtakes: the blocks that come free are for this one
            num_admitted += 1
            self._enter_slot(request)
            budget = self._add_chunk(rows, request, budget)
        del self.waiting[:num_admitted]
        return budget

    def _enter_slot(self, request: Request) -> None:
        request.slot = heappop(self._free_slots)
        request.state = RequestState.RUNNING
        request.admissions += 1
        insort(self.running, request, key=_arrival)
        self.step.num_hit_tokens += request.num_computed
        if request.num_preemptions:
            self.num_preempted_waiting -= 1
            self.step.num_recomputed_tokens += max(0, request.num_lost - request.num_computed)
        else:
            request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
            self.step.admitted.append(request)

    def _headroom(self, request: Request) -> int:
        """Blocks that stay free after an admission. A lone request needs none: waiting for more could last for ever."""
        if not self.running:
            return 0
        if request.num_preemptions:  # it shall not be preempted again before everybody has filled a block
            return self.config.watermark_blocks + len(self.running)
        return self.config.watermark_blocks

    def _add_chunk(self, rows: list[BatchRow], request: Request, budget: int) -> int:
        num_new = min(request.num_tokens - request.num_computed, self.config.max_chunk_tokens, budget)
        rows.append(BatchRow(request, num_new))
        return budget - num_new
