"""The life of one request: check, admit, enqueue, stream, settle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from common.clock import Clock
from common.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    LimitExceededError,
    TidegateError,
    UnavailableError,
)
from common.metrics import GatewayMetrics
from common.types import FinishReason, PositionLogprobs, Reason
from common.waiting import done_within
from gateway.admission.drain_rate import DrainRate
from gateway.admission.limiter import Cost, Limiter
from gateway.answer import Accepted, Answer, Event, Outlet, TextDelta
from gateway.background import Background
from gateway.bookkeeper import Bookkeeper
from gateway.dispatcher import Dispatcher
from gateway.ended import show_ended
from gateway.journal import Pen
from gateway.lifecycle import Outcome, RequestState, failed, finished, gone
from gateway.live import LiveRequest, ReadyRequest
from gateway.mailbox import Delivery, Tap
from gateway.placement.fleet import Fleet
from gateway.prompts import PromptReader
from gateway.queueing.queue import Entering, Queue
from gateway.requests import (
    GenerateCall,
    check_idempotency_key,
    check_prompt,
    check_prompt_length,
    check_request_id,
    check_sampling,
    check_tenant_context,
    effective_band,
    resolve_sampling,
)
from gateway.resumption import Resumed, Resumption, key_request_id
from gateway.store_health import StoreHealth
from gateway.tenants import Tenant

_Received = tuple[LiveRequest, Answer, list[TextDelta], Outcome | None]
"""A request, what its client gets of what it has produced already, and the outcome if that was all."""

_CLOSE_WAIT_S = 1.0  # how long the last event of a stream waits for the store to forget the request
_TAKEOVER_RETRY_S = 0.1
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5
_BEFORE_WORKER = (RequestState.RECEIVED, RequestState.ADMITTED, RequestState.QUEUED)


@dataclass(frozen=True, slots=True)
class HandlerSettings:
    """Bounds of a request; see GatewaySettings."""

    gateway_id: str
    max_queue_length: int
    takeover_s: float
    store_patience_s: float


class Handler:
    """Serves requests, each in the task of its call. However a call ends, its request ends once and leaves nothing."""

    def __init__(
        self,
        queue: Queue,
        limiter: Limiter,
        fleet: Fleet,
        dispatcher: Dispatcher,
        prompts: PromptReader,
        background: Background,
        store: StoreHealth,
        metrics: GatewayMetrics,
        clock: Clock,
        drain_rate: DrainRate,
        books: Bookkeeper,
        resumption: Resumption,
        settings: HandlerSettings,
        *,
        choose_id: Callable[[], str],
        choose_seed: Callable[[], int],
        is_answered: Callable[[asyncio.Future[Any], float], Awaitable[bool]],
    ) -> None:
        """`is_answered(step, patience_s)` waits for calls of the store; False once it is silent for so long."""
        self._queue = queue
        self._limiter = limiter
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._background = background
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._drain_rate = drain_rate
        self._books = books
        self._resumption = resumption
        self._settings = settings
        self._choose_id = choose_id
        self._choose_seed = choose_seed
        self._is_answered = is_answered
        self._refusal: Callable[[], TidegateError] | None = None  # for all new requests

    async def drain(self, drain_s: float) -> None:
        """Refuses new requests, lets live ones go on for `drain_s` seconds, then ends them: UNAVAILABLE/DRAINING."""
        self._refusal = _draining
        try:
            async with asyncio.timeout(drain_s):
                await self._dispatcher.wait_idle()
        except TimeoutError:
            self.end_all()

    def end_all(self) -> None:
        """Ends every live request with UNAVAILABLE/DRAINING."""
        for live in self._dispatcher.live:
            live.end(failed(_draining()))

    def fail(self) -> None:
        """A loop has crashed: refuses new requests, and ends those that may wait for it in vain. Streams go on."""
        self._refusal = _broken
        for live in self._dispatcher.live:
            if live.lifecycle.state in _BEFORE_WORKER:
                live.end(failed(_broken()))

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def generate(
        self, tenant: Tenant, call: GenerateCall, deadline: float | None, outlet: Outlet | None = None
    ) -> AsyncGenerator[Event, None]:
        """The events of one answer. `deadline`: monotonic seconds at which the client gives up; `outlet`: takes text
        that then is no event, between those that are, which its caller sends through the same way.

        To be closed by its caller in the task that iterates it; an error thrown into it becomes the request's end.
        Raises TidegateError for every end that is not normal.
        """
        return self._serve(lambda: self._receive(tenant, call), deadline, outlet)

    async def check(self, tenant: Tenant, call: GenerateCall) -> None:
        """Raises what `generate` would for a call that cannot be served, or not by this gateway now."""
        self._check_open()
        self._store.check()
        await self._prepare(tenant, call)

    def resume(
        self, tenant: Tenant, request_id: str, offset: int, deadline: float | None, outlet: Outlet | None = None
    ) -> AsyncGenerator[Event, None]:
        """The events of a resumable answer behind its first `offset` tokens; otherwise as `generate`."""
        return self._serve(lambda: self._receive_again(tenant, request_id, offset), deadline, outlet)

    async def _serve(
        self, receive: Callable[[], Awaitable[_Received]], deadline: float | None, outlet: Outlet | None
    ) -> AsyncGenerator[Event, None]:
        live, answer, deltas, outcome = await self._counting_refusals(receive)
        tap = None if outlet is None else _tap(live, answer, outlet)
        live.deadline = deadline
        alarm = self._set_alarm(live, deadline)
        try:
            if outcome is None:
                yield await self._admit(live)
            else:  # all of it was written down by a former run
                self._end(live, outcome)
                yield Accepted(live.request, live.remaining)
            for delta in deltas:
                yield delta
            while outcome is None:
                deltas, outcome = answer.take(await live.mailbox.take(tap))
                if live.is_paused:
                    self._dispatcher.set_paused(live, False)
                if outcome is not None:
                    self._end(live, outcome)  # decided before it is told: a client may leave right after it
                for delta in deltas:
                    yield delta
            if outcome.error is not None:
                raise outcome.error
            await self._closed(live)
            yield answer.finish(outcome, self._clock.monotonic())
        except TidegateError as error:
            error.budget = error.budget or live.remaining.by_name()
            self._end(live, failed(error))
            raise
        finally:
            # Nothing here may wait: the call may be cancelled again at any time.
            if alarm is not None:
                alarm.cancel()
            self._end(live, self._departure(deadline))

    async def _counting_refusals(self, receive: Callable[[], Awaitable[_Received]]) -> _Received:
        try:
            self._check_open()
            return await receive()
        except TidegateError as error:
            self._metrics.rejected.labels(error.reason.name).inc()
            raise

    async def _receive(self, tenant: Tenant, call: GenerateCall) -> _Received:
        """Checks and registers a request, which from then on has to be ended."""
        live = LiveRequest(await self._prepare(tenant, call), self._clock.monotonic())
        structlog.contextvars.bind_contextvars(request_id=live.fleet_id, tenant=tenant.tenant_id)
        if call.is_resumable or call.idempotency_key:
            resumed = await self._resumption.begin(live, call)
            if resumed is not None:
                return await self._go_on(resumed, 0)
        former = self._dispatcher.find(live.fleet_id)
        if former is not None and former.lifecycle.is_ended:
            await self._closed(former)
        self._check_open()
        self._dispatcher.register(live)
        return live, Answer(live), [], None

    async def _receive_again(self, tenant: Tenant, request_id: str, offset: int) -> _Received:
        check_request_id(request_id)
        structlog.contextvars.bind_contextvars(request_id=request_id, tenant=tenant.tenant_id)
        return await self._go_on(await self._resumption.adopt(tenant, request_id), offset)

    async def _go_on(self, resumed: Resumed, offset: int) -> _Received:
        """Takes up a request where its journal ends. Its former run, which cannot write any more, is ended."""
        live, written = LiveRequest(resumed.request, self._clock.monotonic()), resumed.answer
        answer = Answer(live, offset=offset)
        deltas, outcome = answer.take(Delivery(written.token_ids, written.logprobs, written.finish_reason))
        live.go_on_after(written.token_ids, Pen(resumed.writer))
        former = self._dispatcher.find(live.fleet_id)
        if outcome is None and former is not None:
            if former.pen is not None and former.pen.writer > resumed.writer:  # it was asked for after this one
                outcome = finished(FinishReason.CANCELLED)
            else:
                await self._end_former_run(former)
        if outcome is None:
            self._check_open()
            self._dispatcher.register(live)
        return live, answer, deltas, outcome

    async def _end_former_run(self, former: LiveRequest) -> None:
        outcome = finished(FinishReason.CANCELLED)
        self._end(former, outcome)
        former.end(outcome)
        try:
            async with asyncio.timeout(_CLOSE_WAIT_S):
                await former.is_forgotten.wait()
        except TimeoutError:  # its last steps wait for the store
            raise self._store.unavailable() from None

    async def _prepare(self, tenant: Tenant, call: GenerateCall) -> ReadyRequest:
        check_request_id(call.request_id)
        check_idempotency_key(call)
        model = self._fleet.find_model(call.model)
        check_sampling(call.sampling, model.limits)
        prompt = check_prompt(call.prompt, model.limits)
        token_ids = await self._prompts.read(prompt, model)
        check_prompt_length(len(token_ids), model.limits)
        check_tenant_context(len(token_ids), tenant.limits)
        sampling = resolve_sampling(call.sampling, model.limits, len(token_ids), self._choose_seed, tenant.limits)
        self._fleet.check_fits(model, len(token_ids), sampling.window)
        return ReadyRequest(
            request_id=_request_id(call) or self._choose_id(),
            tenant=tenant,
            band=effective_band(tenant.band, call.band),
            model=model,
            prompt_token_ids=token_ids,
            sampling=sampling,
            stop=call.sampling.stop,
            return_token_ids=call.return_token_ids,
        )

    async def _admit(self, live: LiveRequest) -> Accepted:
        """Decides, within the patience with the store: a request that has its part of the limits waits for it if need
        be, and its client is told that it is accepted."""
        request, tenant = live.request, live.request.tenant
        patience_s = 0.0 if self._store.is_lost else self._settings.store_patience_s
        cost = Cost(len(request.prompt_token_ids), request.sampling.max_tokens)
        # If the client leaves meanwhile, the limiter itself undoes it.
        reserving = self._limiter.reserve(tenant.tenant_id, live.fleet_id, cost, tenant.limits, patience_s=patience_s)
        if patience_s > 0:  # sent together: most requests are admitted, and wait for the store only once
            live.entering = self._ask_to_enter(live, if_reserved=True)
        live.remaining = await reserving
        live.is_reserved = True
        if not self._is_in(live):
            # In a step of its own: if the client leaves now, it must still be known what was written.
            live.admission = self._background.spawn(self._enter_queue(live), "admission")
            if not self._limiter.is_confirmed(live.fleet_id):
                patience_s = 0.0  # the store has been silent for so long already
            if await self._is_answered(live.admission, patience_s):
                live.admission.result()
        self._books.promise(live)
        return Accepted(live.request, live.remaining)

    def _is_in(self, live: LiveRequest) -> bool:
        """Opens the books for a request that entered the queue with its reservation. False if it did not, or not yet.

        The books need not have answered before the client is told: what is sent to them reaches them.
        """
        if live.lifecycle.is_ended or not _has_entered(live):
            return False
        live.is_enqueued = True
        self._dispatcher.enter_queue(live)
        self._check_unbroken()
        self._books.open(live).add_done_callback(lambda opening: self._opened(live, opening))
        return True

    def _opened(self, live: LiveRequest, opening: asyncio.Future[Any]) -> None:
        is_failed = not opening.cancelled() and opening.exception() is not None
        if is_failed and not live.lifecycle.is_ended:
            live.admission = self._background.spawn(self._enter_queue(live), "admission")

    async def _enter_queue(self, live: LiveRequest) -> None:
        if live.lifecycle.is_ended:
            return
        self._dispatcher.enter_queue(live)
        backoff_s = _FIRST_BACKOFF_S
        try:
            while not live.lifecycle.is_ended and not await self._is_entered(live):
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        except TidegateError as error:
            live.end(failed(error))  # its client may wait for tokens already
            raise

    async def _is_entered(self, live: LiveRequest) -> bool:
        """Puts it into queue and books, as far as it is not there. False if the store does not answer now."""
        try:
            if not live.is_enqueued:
                # A claim is proof that an earlier try has entered it.
                if live.claim is None and not await self._enqueue(live):
                    live.end(finished(FinishReason.CANCELLED))
                    return True
                live.is_enqueued = True
            await self._books.open(live)
        except UnavailableError as error:
            self._store.failed(error)
            return False
        except LimitExceededError as error:
            # Not for one place: everybody who was refused is told about the same time.
            num_ahead = max(1, self._settings.max_queue_length // 10)
            error.retry_after_s = self._drain_rate.retry_after_s(num_ahead, self._clock.monotonic())
            raise
        self._check_unbroken()
        return True

    def _check_unbroken(self) -> None:
        if self._refusal is _broken:  # since it was received: nobody else ends it
            raise _broken()

    def _ask_to_enter(self, live: LiveRequest, *, if_reserved: bool = False) -> Entering:
        most, most_of_tenant = self._settings.max_queue_length, live.request.tenant.limits.max_queue_length
        entry = self._dispatcher.entry_of(live)
        entering = self._queue.enqueue(entry, max_length=most, max_of_tenant=most_of_tenant, if_reserved=if_reserved)
        self._dispatcher.dispatch()  # it goes to the store behind the enqueue, and need not wait for the answer
        return entering

    async def _enqueue(self, live: LiveRequest) -> bool:
        """Enters the queue. A former run at another gateway leaves it first: it notices that it may not write any more,
        or it is reaped. False if in turn a later run has taken over."""
        give_up_at = self._clock.monotonic() + self._settings.takeover_s
        while True:
            entering, live.entering = live.entering or self._ask_to_enter(live), None
            try:
                if await entering:
                    self._dispatcher.kick()  # it may have gone behind the dispatch that was to follow it
                    return True
                continue  # admitted after all, by another part of the limits: it needs no reservation
            except DuplicateRequestError:
                if not live.is_resumed or self._clock.monotonic() >= give_up_at:
                    raise
            if live.lifecycle.is_ended or not await self._resumption.is_mine(live):
                return False
            await asyncio.sleep(_TAKEOVER_RETRY_S)

    def _set_alarm(self, live: LiveRequest, deadline: float | None) -> asyncio.TimerHandle | None:
        """Ends the request at its client's deadline: one timer for the stream instead of one for each wait."""
        if deadline is None:
            return None
        left_s = max(deadline - self._clock.monotonic(), 0.0)
        return asyncio.get_running_loop().call_later(left_s, lambda: live.end(failed(_deadline_exceeded())))

    def _departure(self, deadline: float | None) -> Outcome:
        """The outcome of a call that ended without one: the client left, or its deadline passed during a write."""
        is_late = deadline is not None and self._clock.monotonic() >= deadline
        return failed(_deadline_exceeded()) if is_late else gone()

    def _end(self, live: LiveRequest, outcome: Outcome) -> None:
        """Decides the outcome, once: the worker stops, queue and limits are told, the metrics count it."""
        if not live.lifecycle.finish(outcome):
            return
        self._dispatcher.stop_work(live)
        if self._dispatcher.find(live.fleet_id) is not live:  # only replayed: nothing ran
            return
        is_complete = outcome.finish_reason is not None
        num_output_tokens = live.num_delivered_tokens if is_complete else len(live.output_token_ids)
        num_output_tokens = max(num_output_tokens - live.num_prior_tokens, 0)
        live.closing = self._background.spawn(self._close(live, outcome, num_output_tokens), "close")
        show_ended(self._metrics, live, outcome, num_output_tokens, now=self._clock.monotonic())

    async def _close(self, live: LiveRequest, outcome: Outcome, num_output_tokens: int) -> None:
        if live.admission is not None:
            await done_within(live.admission, None)
        elif live.entering is not None:  # nobody waits for that any more: if it is still to come, the queue undoes it
            live.entering.cancel()
            live.is_enqueued = _has_entered(live)
        try:  # sent together; each makes up for it if there is no answer
            finishing = self._queue.finish(live.fleet_id) if live.is_enqueued else None
            settling = self._settle(live, num_output_tokens) if live.is_reserved else None
            closing = self._books.close(live, outcome) if live.pen is None else None
            for step in (finishing, settling, closing):
                with self._store.watched():
                    if step is not None:
                        await step
            if live.pen is not None:  # the books say what the journal has
                await self._resumption.end(live)
                closing = self._books.close(live, outcome)
                with self._store.watched():
                    if closing is not None:
                        await closing
        finally:
            self._dispatcher.unregister(live)

    def _settle(self, live: LiveRequest, num_output_tokens: int) -> Awaitable[None]:
        """Pays for what was done: nothing, if no worker ever had the request."""
        was_taken = live.taken_at is not None
        return self._limiter.settle(
            live.request.tenant.tenant_id,
            live.fleet_id,
            num_prompt_tokens=live.num_payable_prompt_tokens if was_taken else 0,
            num_output_tokens=num_output_tokens,
        )

    async def _closed(self, live: LiveRequest) -> None:
        """Waits until the store has forgotten the request, so that its id is free when the client hears of the end."""
        if live.closing is not None:
            await done_within(live.closing, _CLOSE_WAIT_S)


def _tap(live: LiveRequest, answer: Answer, outlet: Outlet) -> Tap:
    """Sends what needs no decision on its way without waking the request's task for it: nearly every token."""
    outlet.on_stuck = lambda error: live.end(failed(error))

    def pour(token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> bool:
        if not answer.pour(token_ids, logprobs, outlet):
            return False
        if answer.is_stopped:
            live.end(finished(FinishReason.STOP))
        return True

    return pour


def _has_entered(live: LiveRequest) -> bool:
    """Whether the store has said that a request is in the queue, when that was asked together with its reservation."""
    entering = live.entering
    if entering is None or not entering.done() or entering.cancelled():
        return False
    return entering.exception() is None and entering.result()


def _request_id(call: GenerateCall) -> str:
    return key_request_id(call.idempotency_key) if call.idempotency_key else call.request_id


def _draining() -> UnavailableError:
    return UnavailableError(
        "this gateway is shutting down; another one can serve", reason=Reason.DRAINING, retry_after_s=1.0
    )


def _broken() -> UnavailableError:
    return UnavailableError("this gateway is broken; another one can serve", reason=Reason.INTERNAL, retry_after_s=1.0)


def _deadline_exceeded() -> DeadlineExceededError:
    return DeadlineExceededError("the client's own deadline passed")
