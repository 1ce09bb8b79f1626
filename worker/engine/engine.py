"""The engine: takes requests, computes them step by step, and tells each one's session what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from common.errors import DuplicateRequestError, LimitExceededError, UnavailableError
from common.types import Band, FinishReason, ModelLimits, Reason, SamplingParams
from common.window import Window, salt_of
from worker.cache.host import Copier, CopyOrders
from worker.cache.manager import CacheManager
from worker.cache.pool import IntegrityError
from worker.engine.batch import Batch, SampledToken
from worker.engine.events import RequestOutput, StepOutput, StepStats
from worker.engine.executor import ExecutionError, Executor, SamplingError
from worker.engine.outbox import Outbox
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.engine.trace import Tracer
from worker.engine.validation import check_submission, check_window

MAX_WAITING = 16
"""Requests taken beyond the slots. More would be parked here, where the fleet's queue cannot reorder them."""

MAX_FAILED_STEPS = 3
"""Steps that fail one after the other before the executor counts as broken."""


class Engine:
    """Owns every accepted request until its one terminal event. Not thread-safe: one thread calls it.

    A request is named by (session id, request id, attempt), so a late abort of one attempt cannot hit another.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        manager: CacheManager,
        limits: ModelLimits,
        eos_token_ids: Iterable[int],
        now: Callable[[], float] | None = None,
        tracer: Tracer | None = None,
        max_waiting: int = MAX_WAITING,
        copier: Copier | None = None,
    ) -> None:
        """`now` gives seconds that never go back; without it time stands still, so only token bounds hold.
        `tracer`, if any, is told of every step; `max_waiting` requests are taken beyond the slots. `copier` copies
        between the executor's blocks and the host memory that the manager plans with.

        Raises ValueError if `limits`, which gateways see, promises what pool, scheduler or executor do not hold.
        """
        promised = (limits.block_size, limits.num_blocks, limits.max_num_seqs, limits.windows)
        held = (manager.block_size, manager.pool.num_usable, scheduler.config.max_num_seqs, manager.windows)
        computed = (executor.block_size, executor.num_blocks)
        if (copier is None) != (manager.host is None):
            raise ValueError("a copier and host memory to copy to belong together")
        if promised != held or computed != (manager.block_size, len(manager.pool.blocks)):
            raise ValueError(
                f"(block_size, num_blocks, max_num_seqs, windows) is {promised} in the limits, {held} in the engine; "
                f"the executor has (block_size, num_blocks) {computed}, the pool {len(manager.pool.blocks)} blocks"
            )
        self._executor = executor
        self._scheduler = scheduler
        self._manager = manager
        self._limits = limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._now = now or _standing_still
        self._tracer = tracer
        self._copier = copier
        self._max_requests = limits.max_num_seqs + max_waiting
        self._requests: dict[int, dict[tuple[str, int], Request]] = {}  # by session
        self._outbox = Outbox()
        self._num_arrivals = 0
        self._next_deadline_s = math.inf  # no request's deadline is earlier
        self._num_failed_steps = 0
        self._num_abandoned = 0  # since the last step
        self._draining = False

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or tell something."""
        return self._scheduler.has_requests or self._outbox.has_news

    @property
    def num_requests(self) -> int:
        """Accepted and not ended."""
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    @property
    def pause_s(self) -> float:
        """Seconds until a step would compute or tell something; of use while there is work."""
        return 0.0 if self._outbox.has_news else self._scheduler.pause_s(self._now())

    def open_session(self, session_id: int) -> None:
        """Makes a session known: the next step tells it the block usage. Raises ValueError if it is open."""
        if session_id in self._requests:
            raise ValueError(f"session {session_id} is open already")
        self._requests[session_id] = {}
        self._outbox.open(session_id)

    def submit(
        self,
        session_id: int,
        request_id: str,
        attempt: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        band: Band = Band.NORMAL,
        cache_salt: str = "",
        arrived_s: float | None = None,
        timeout_s: float | None = None,
        may_hand_back: bool = False,
    ) -> None:
        """Accepts a request of an open session; from here on it gets exactly one terminal event.

        `output_token_ids` were generated by earlier attempts and count as output; `arrived_s` is when it came by the
        engine's clock, None means now. After `timeout_s` it is rejected with DEADLINE, if it has not ended; it may be
        handed back if that is said. Raises, changing nothing:
        InvalidRequestError if it is out of range or can never fit, DuplicateRequestError if it is here already,
        LimitExceededError (NO_CREDIT) if there is no room now, UnavailableError if draining or the session is over.
        """
        requests = self._requests.get(session_id)
        if requests is None:
            raise UnavailableError(f"session {session_id} is not open")
        if (request_id, attempt) in requests:
            raise DuplicateRequestError(f"attempt {attempt} of request {request_id} is here already")
        if self._draining:
            raise UnavailableError("the worker is draining and takes no new request", reason=Reason.DRAINING)
        check_window(self._limits, sampling)
        window = self._window_of(sampling, len(prompt_token_ids))
        windows = self._limits.narrowed(window)
        max_kv_tokens = self._manager.max_tokens(windows)
        check_submission(self._limits, max_kv_tokens, prompt_token_ids, output_token_ids, sampling)
        if self.num_requests >= self._max_requests:
            message = f"the worker has {self.num_requests} requests and takes at most {self._max_requests}"
            raise LimitExceededError(message, reason=Reason.NO_CREDIT)
        self._num_arrivals += 1
        arrived_s = self._now() if arrived_s is None else arrived_s
        request = Request(
            request_id=request_id,
            attempt=attempt,
            session_id=session_id,
            token_ids=[*prompt_token_ids, *output_token_ids],
            num_prompt_tokens=len(prompt_token_ids),
            sampling=sampling,
            band=band,
            cache_salt=salt_of(cache_salt, window),
            windows=windows if any(windows) else (),
            arrival=self._num_arrivals,
            arrived_s=arrived_s,
            deadline_s=None if timeout_s is None else arrived_s + timeout_s,
            may_hand_back=may_hand_back,
            num_given_tokens=len(prompt_token_ids) + len(output_token_ids),
            stop_ids=self._stop_ids(sampling),
            max_total_tokens=min(
                len(prompt_token_ids) + sampling.max_tokens,
                self._limits.context_length,
                max_kv_tokens + 1,  # the last token's own KV is never needed
            ),
        )
        if request.deadline_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
        requests[request_id, attempt] = request
        self._scheduler.add(request)

    def abort(self, session_id: int, request_id: str, attempt: int) -> bool:
        """Ends a request, whatever its state, with reason CANCELLED; returns whether it was there."""
        request = self._requests.get(session_id, {}).get((request_id, attempt))
        if request is None:
            return False
        request.finish_reason = FinishReason.CANCELLED
        self._outbox.add_output(session_id, _output(request, None))
        self._end([request])
        return True

    def set_paused(self, session_id: int, request_id: str, attempt: int, is_paused: bool) -> None:
        """Stops computing for a request, which stays where it is, or goes on with it. Nothing if it is not there, or in
        a mode in which nobody makes way."""
        request = self._requests.get(session_id, {}).get((request_id, attempt))
        if request is not None and self._scheduler.levels.can_pause:
            request.is_paused = is_paused
            self._outbox.touch()

    def abort_session(self, session_id: int) -> None:
        """Ends a session and its requests. Nobody is told: the session is gone. Nothing if it is not open."""
        requests = self._requests.get(session_id)
        if requests is None:
            return
        self._num_abandoned += len(requests)
        self._end(list(requests.values()))
        del self._requests[session_id]
        self._outbox.close(session_id)

    def reject(self, session_id: int, request_id: str, attempt: int, reason: Reason, message: str) -> None:
        """Tells a session with the next step that a submit was not taken. Nothing if the session is not open."""
        if session_id in self._requests:
            self._outbox.add_rejected(session_id, request_id, attempt, reason, message)

    def drain(self) -> None:
        """Refuses new requests from here on; accepted ones are finished."""
        self._draining = True
        self._outbox.touch()

    def step(self) -> StepOutput:
        """Schedules, executes and updates once. Raises what the executor raises when it is broken."""
        started_s = self._now()
        if started_s >= self._next_deadline_s:
            self._expire(started_s)
        batch = self._scheduler.schedule(started_s)
        self._hand_back(self._scheduler.list_hand_backs())
        orders = self._copy()
        sampled, error = self._execute(batch)
        self._update(batch, sampled)
        output = self._collect(batch, sampled, error, orders)
        if self._tracer is not None and batch.rows:
            self._tracer.record_step(self._scheduler.step, output.stats, started_s, self._now())
        return output

    def check_integrity(self) -> None:
        """Audits everything: linear in the pool, for tests. Raises IntegrityError with what is wrong."""
        self._scheduler.check_integrity()
        known = [request for requests in self._requests.values() for request in requests.values()]
        held = [*self._scheduler.running, *self._scheduler.waiting]
        if {id(request) for request in known} != {id(request) for request in held}:
            raise IntegrityError(f"{len(known)} requests are known by name, {len(held)} are held by the scheduler")

    def _copy(self) -> CopyOrders:
        """Has copied what the scheduled step needs, and begins what can be copied beside it."""
        if self._copier is None or self._manager.host is None:
            return CopyOrders()
        orders = self._manager.host.take_orders()
        if not orders.is_empty:
            self._copier.begin(orders)
        return orders

    def _execute(self, batch: Batch) -> tuple[Sequence[SampledToken | None], ExecutionError | None]:
        """Runs the batch. If that failed: no tokens, and the requests to blame have ended with an error."""
        if not batch.rows:
            return (), None
        started_s = self._now()
        try:
            sampled = self._executor.execute(batch)
        except SamplingError as error:
            for index, message in error.messages.items():
                self._fail([batch.rows[index].request], message)
            return (), error
        except ExecutionError as error:
            self._num_failed_steps += 1
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                raise
            self._fail([row.request for row in batch.rows], "the step that computed the request failed")
            return (), error
        if len(sampled) != len(batch.rows):
            raise IntegrityError(f"the executor returned {len(sampled)} tokens for {len(batch.rows)} rows")
        self._num_failed_steps = 0
        ended_s = self._now()
        self._scheduler.observe(ended_s - started_s)
        if self._tracer is not None:
            self._tracer.record_execution(batch, self._scheduler.levels, started_s, ended_s)
        return sampled, None

    def _update(self, batch: Batch, sampled: Sequence[SampledToken | None]) -> None:
        """Advances the requests by what was computed, and ends those that are done. Nothing if the step failed."""
        block_size = self._manager.block_size
        add_output = self._outbox.add_output
        finished: list[Request] = []
        for row, token in zip(batch.rows, sampled, strict=False):
            request = row.request
            if row.num_new < 1:
                raise IntegrityError(f"{request} was scheduled without a token to compute")
            request.num_computed += row.num_new
            if request.num_computed // block_size > request.num_published:
                self._manager.publish(request)
            if (token is None) != (request.num_computed < len(request.token_ids)):
                raise IntegrityError(f"the executor returned {token} at {request.num_computed} computed tokens")
            if token is None:
                continue
            request.token_ids.append(token.token_id)
            request.finish_reason = _finish_reason(request, token.token_id)
            if request.finish_reason is not None:
                finished.append(request)
            add_output(request.session_id, _output(request, token))
        if finished:
            self._end(finished)

    def _collect(
        self,
        batch: Batch,
        sampled: Sequence[SampledToken | None],
        error: ExecutionError | None,
        orders: CopyOrders,
    ) -> StepOutput:
        if self._copier is not None and self._manager.host is not None:  # the idle worker has no block on its way
            self._manager.host.complete(self._copier.finished(wait=not self._scheduler.has_requests))
        step = self._scheduler.step
        for request in step.admitted:
            self._outbox.account(request.session_id, request.request_id, request.attempt)
        sessions = self._outbox.collect(self._scheduler, self._num_open_slots())
        counts = self._manager.counts
        stats = StepStats(
            num_rows=len(batch.rows),
            num_tokens=batch.num_tokens,
            num_sampled=len(sampled) - sampled.count(None),
            num_prompt_tokens=sum(request.num_prompt_tokens for request in step.admitted),
            num_hit_tokens=step.num_hit_tokens,
            num_preemptions=len(step.preempted),
            num_recomputed_tokens=step.num_recomputed_tokens,
            num_yielded=step.num_yielded,
            num_overtakes=step.num_overtakes,
            num_abandoned=self._num_abandoned,
            num_decodes=step.num_decodes - step.num_long,
            num_long_decodes=step.num_long,
            first_chunk_waits_s=tuple(step.first_chunk_waits_s),
            num_saved_tokens=orders.num_saved * self._manager.block_size,
            num_loaded_tokens=len(orders.loads) * self._manager.block_size,
            thrash_ratio=self._scheduler.memory.thrash.ratio,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            empty_blocks=counts.empty,
            cached_blocks=counts.cached,
            referenced_blocks=counts.referenced,
            swapping_blocks=counts.swapping,
            promised_blocks=self._manager.num_promised,
            num_held_tokens=self._scheduler.num_held_tokens,
            num_held_slots=counts.referenced * self._manager.block_size,
        )
        self._num_abandoned = 0
        return StepOutput(sessions, stats, error)

    def _num_open_slots(self) -> int:
        """What gateways may count on: with long requests that make way, no more than the waiting list takes."""
        if self._draining:
            return 0
        return min(self._scheduler.num_open_slots, max(0, self._max_requests - self.num_requests))

    def _expire(self, now_s: float) -> None:
        """Ends the requests whose clients have given up."""
        known = [request for requests in self._requests.values() for request in requests.values()]
        deadlines = {request: request.deadline_s for request in known if request.deadline_s is not None}
        expired = [request for request, deadline_s in deadlines.items() if deadline_s <= now_s]
        for request in expired:
            message = "the client's own deadline passed"
            self._outbox.add_rejected(request.session_id, request.request_id, request.attempt, Reason.DEADLINE, message)
        self._end(expired)
        self._next_deadline_s = min((it for it in deadlines.values() if it > now_s), default=math.inf)

    def _hand_back(self, requests: list[Request]) -> None:
        for request in requests:
            self._outbox.add_handed_back(request.session_id, request.request_id, request.attempt)
        if requests:
            self._end(requests)

    def _fail(self, requests: list[Request], message: str) -> None:
        """Tells requests that they failed, and ends them."""
        for request in requests:
            self._outbox.add_rejected(request.session_id, request.request_id, request.attempt, Reason.INTERNAL, message)
        self._end(requests)

    def _end(self, requests: list[Request]) -> None:
        """Forgets requests, whose terminal event is told or needless, and gives back what they hold."""
        self._scheduler.finish(requests)
        for request in requests:
            if not request.admissions:
                self._outbox.account(request.session_id, request.request_id, request.attempt)
            del self._requests[request.session_id][request.request_id, request.attempt]

    def _window_of(self, sampling: SamplingParams, num_prompt: int) -> Window | None:
        """What a request asks to see of itself, if that is less than it would see anyway."""
        window = sampling.window
        if window is None or self._limits.narrowed(window) == self._limits.windows:
            return None
        most = min(num_prompt + sampling.max_tokens, self._limits.context_length)
        return window if window.num_tokens < most else None

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        if sampling.ignore_eos:
            return frozenset(sampling.stop_token_ids)
        return self._eos_token_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else self._eos_token_ids


def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Whether the token just appended is the last: a stop token after at least min_tokens others, or no more room."""
    if token_id in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens:
        return FinishReason.STOP
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH
    return None


def _output(request: Request, token: SampledToken | None) -> RequestOutput:
    num_told = len(request.token_ids) - request.num_given_tokens
    is_first = num_told == (0 if token is None else 1)
    return RequestOutput(
        request.request_id,
        request.attempt,
        (token.token_id,) if token is not None else (),
        (token.logprobs,) if token is not None and token.logprobs is not None else (),
        request.finish_reason,
        request.num_cached_tokens if is_first else 0,
    )


def _standing_still() -> float:
    return 0.0
