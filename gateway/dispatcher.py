"""Between queue and workers: claims go to sessions, events to requests, lost requests back to the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import structlog

from common.clock import Clock
from common.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    TidegateError,
    UnavailableError,
)
from common.metrics import GatewayMetrics
from common.types import BlockUsage, FinishReason, Reason
from gateway.admission.drain_rate import DrainRate
from gateway.affinity import Affinity
from gateway.background import Background
from gateway.lifecycle import RequestState, failed, finished
from gateway.live import LiveRequest
from gateway.placement.fleet import Fleet
from gateway.placement.model import ServedModel
from gateway.placement.worker import RejectedEvent, TokensEvent, WorkerSession, WorkerState
from gateway.queueing.meter import OutputMeter
from gateway.queueing.queue import Claim, Place, Queue, QueueEntry, WorkerReport
from gateway.reach import Reach
from gateway.reports import PendingReports
from gateway.store_health import StoreHealth

_log = structlog.get_logger(__name__)

_NO_LIMIT = 2**53  # of what was accepted once
_INBOX_WAIT_S = 1.0
_MAX_HAND_BACKS = 3
"""How often workers may hand a request back; after that the one that has it keeps it."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_REPORT_DELAY_S = 0.002  # how long a worker's numbers wait for those of the next steps, while a request waits for them
_IDLE_REPORT_DELAY_S = (
    0.02  # while none does; they go with the next request, too. Others' requests have others to do it
)

# A worker that refuses with one of these has no room or leaves; with any other the request cannot be served.
_REFUSALS = frozenset({Reason.NO_CREDIT, Reason.DRAINING})
_INVALID_REASONS = frozenset(
    {
        Reason.INVALID_PARAMETER,
        Reason.EMPTY_PROMPT,
        Reason.PROMPT_TOO_LONG,
        Reason.INVALID_TOKEN_ID,
        Reason.NEVER_FITS,
    }
)
_CAUSE: Mapping[Reason, str] = MappingProxyType({Reason.NO_CREDIT: "no_credit", Reason.DRAINING: "draining"})


@dataclass(frozen=True, slots=True)
class DispatcherSettings:
    """Bounds of the loops; see GatewaySettings."""

    gateway_id: str
    max_attempts: int  # workers that a request may lose
    credit_output_tokens: int  # for which a claim reserves blocks
    reach_ttl_s: float  # how long the queue is to remember which workers are reached
    max_unread_tokens: int  # of a stream; from there on its worker pauses


@dataclass(frozen=True, slots=True)
class _Run:
    """Of the dispatch script, with the reports that it takes in."""

    reports: Sequence[WorkerReport]
    claims: Awaitable[Sequence[Claim]]


class Dispatcher:
    """Owner of the live requests' claims. Everything but the store's calls happens at once, on the event loop."""

    def __init__(
        self,
        queue: Queue,
        fleet: Fleet,
        background: Background,
        store: StoreHealth,
        metrics: GatewayMetrics,
        clock: Clock,
        drain_rate: DrainRate,
        settings: DispatcherSettings,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._background = background
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._drain_rate = drain_rate
        self._settings = settings
        self._live: dict[str, LiveRequest] = {}
        self._reports = PendingReports()
        self._affinity = Affinity()
        self.reach = Reach(queue, fleet, store, ttl_s=settings.reach_ttl_s, on_change=self.kick)
        self.output_meter = OutputMeter()
        self._wake = asyncio.Event()
        self._run: _Run | None = None  # of the script, sent and not taken in
        self._waiting: set[LiveRequest] = set()  # in the queue
        self._reporting: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Starts the loops."""
        self._background.run(self._dispatch_loop, "dispatch")
        self._background.run(self._inbox_loop, "inbox")

    # Live requests

    @property
    def live(self) -> tuple[LiveRequest, ...]:
        """Requests held by this gateway, those that are just closing included."""
        return tuple(self._live.values())

    def find(self, fleet_id: str) -> LiveRequest | None:
        """A request held by this gateway."""
        return self._live.get(fleet_id)

    def register(self, live: LiveRequest) -> None:
        """Makes a request known, before it is enqueued. Raises DuplicateRequestError."""
        if live.fleet_id in self._live:
            raise DuplicateRequestError(f"request_id: {live.request.request_id} is the id of a live request")
        self._live[live.fleet_id] = live
        self._idle.clear()
        self._metrics.live_streams.set(len(self._live))

    def unregister(self, live: LiveRequest) -> None:
        """Forgets a request that has ended and left the queue."""
        if self._live.get(live.fleet_id) is live:
            del self._live[live.fleet_id]
            live.is_forgotten.set()
            self._metrics.live_streams.set(len(self._live))
            if not self._live:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is live."""
        await self._idle.wait()

    def kick(self) -> None:
        """Something changed that may let a waiting request go: dispatch soon."""
        self._wake.set()

    def dispatch(self) -> None:
        """As `kick`, but at once, so that it goes with what was sent to the queue just before; unless others wait, with
        whom it costs less."""
        if self._run is None and not self._waiting:
            self._begin_run()
        self._wake.set()

    def enter_queue(self, live: LiveRequest) -> None:
        """A request is in the queue, if no worker has it by now."""
        live.enter_queue(self._clock.monotonic())
        if live.lifecycle.state is RequestState.QUEUED:
            self._wait(live)

    def _wait(self, live: LiveRequest) -> None:
        self._waiting.add(live)
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = asyncio.get_running_loop().call_later(_REPORT_DELAY_S, self._report)

    def stop_work(self, live: LiveRequest) -> None:
        """The request does not wait any more, and the worker, if one has it, is told to stop."""
        self._waiting.discard(live)
        claim, live.claim = live.claim, None
        if claim is not None:
            session = self._fleet.session(claim.worker_id, claim.worker_epoch)
            if session is not None:
                session.abort(live.fleet_id, claim.attempt)

    def set_paused(self, live: LiveRequest, is_paused: bool) -> None:
        """Tells the worker, if one has the request, to compute nothing more for it for now, or to go on."""
        live.is_paused = is_paused
        session = None if live.claim is None else self._fleet.session(live.claim.worker_id, live.claim.worker_epoch)
        if session is not None and live.claim is not None:
            session.set_paused(live.fleet_id, live.claim.attempt, is_paused)

    async def cancel(self, fleet_id: str) -> None:
        """Ends a live request, here or at the gateway that holds it. Raises NotFoundError if there is none."""
        if not self._cancel_here(fleet_id) and not await self._queue.send_cancel(fleet_id):
            raise NotFoundError("request_id: no live request of this tenant has it")

    def _cancel_here(self, fleet_id: str) -> bool:
        live = self._live.get(fleet_id)
        if live is None or live.lifecycle.is_ended:
            return False
        live.end(finished(FinishReason.CANCELLED))
        return True

    def entry_of(self, live: LiveRequest) -> QueueEntry:
        """A request as the queue is to know it now."""
        model = live.request.model.limits.model
        workers = (
            s.worker_id for s in self._fleet.sessions if s.state is WorkerState.READY and s.limits.model == model
        )
        sampling = live.request.sampling
        num_left = min(sampling.max_tokens - len(live.output_token_ids), self._settings.credit_output_tokens)
        return live.queue_entry(
            self._settings.gateway_id,
            num_tokens_needed=self._fleet.num_credit_tokens(model, live.num_input_tokens + num_left, sampling.window),
            cached_blocks=self._affinity.believed(live, workers),
        )

    # Claims

    def _accept(self, claim: Claim, *, is_alone: bool) -> None:
        live = self._live.get(claim.request_id)
        if live is None:
            # Its finish did not reach the store, or was overtaken by the claim.
            self._background.spawn(self._finish_unknown(claim.request_id), "finish_unknown")
            return
        if (
            live.lifecycle.is_ended
            or live.is_generated
            or (live.claim is not None and live.claim.attempt >= claim.attempt)
        ):
            return
        self._metrics.claims.inc()
        self.stop_work(live)  # of an attempt that the queue has given up; usually there is none
        now = self._clock.monotonic()
        self._drain_rate.count(now)
        if live.taken_at is None:
            self._metrics.of_band(live.request.band).queue_wait.observe(now - live.queued_at)
        live.begin(claim, now)
        self._waiting.discard(live)
        session = self._fleet.session(claim.worker_id, claim.worker_epoch)
        if session is None or session.state is not WorkerState.READY:
            self._return_to_queue(live, claim, Place.SAME, "no_session")
            return
        try:
            submission = live.submission(claim.attempt, now, may_hand_back=self._may_hand_back(live))
            session.submit(submission, is_alone=is_alone)
        except UnavailableError:
            self._return_to_queue(live, claim, Place.SAME, "no_session")
            return
        self._affinity.submitted(live, claim)

    def _may_hand_back(self, live: LiveRequest) -> bool:
        return live.num_hand_backs < _MAX_HAND_BACKS and self._fleet.num_ready(live.request.model.limits.model) > 1

    async def _finish_unknown(self, fleet_id: str) -> None:
        try:
            await self._queue.finish(fleet_id)
        except UnavailableError as error:
            self._store.failed(error)

    def _return_to_queue(self, live: LiveRequest, claim: Claim, place: Place, cause: str) -> None:
        """Undoes a claim. After a refusal it waits a little, or the same stale numbers would bring it back at once."""
        live.renew_prefix()
        # One that never began has waited all the time; one that was interrupted waits anew.
        live.back_to_queue(queued_at=live.queued_at if place is Place.SAME else self._clock.monotonic())
        self._wait(live)
        self._metrics.requeued.labels(cause).inc()
        delay_s = 0.0
        if place is Place.SAME:
            delay_s = min(_FIRST_BACKOFF_S * 2**live.num_refusals, _MAX_BACKOFF_S)
            live.num_refusals += 1
        self._background.spawn(self._requeue(live, claim, place, delay_s), "requeue")

    async def _requeue(self, live: LiveRequest, claim: Claim, place: Place, delay_s: float) -> None:
        backoff_s = delay_s
        while True:
            await asyncio.sleep(backoff_s)
            if live.lifecycle.is_ended or live.claim is not None:
                return
            try:
                await self._queue.requeue(self.entry_of(live), attempt=claim.attempt, place=place)
            except UnavailableError as error:
                self._store.failed(error)
                backoff_s = min(max(2 * backoff_s, _FIRST_BACKOFF_S), _MAX_BACKOFF_S)
                continue
            # False: the queue has undone the claim by itself, or lost the request, which the heartbeat then tells.
            self._store.answered()
            self.kick()
            return

    def _resume(self, live: LiveRequest, claim: Claim, cause: str, *, is_loss: bool) -> None:
        """Its worker does not go on with it: another one does. Losses are bounded; what a drain hands back is none."""
        live.num_losses += is_loss
        if live.num_losses >= self._settings.max_attempts:
            live.claim = None
            message = f"the worker was lost {live.num_losses} times; no further attempt is made"
            live.end(failed(UnavailableError(message, reason=Reason.WORKER_LOST, retry_after_s=1.0)))
            return
        _log.info("request_resumes", request_id=live.fleet_id, worker_id=claim.worker_id, cause=cause)
        self._return_to_queue(live, claim, Place.FIRST, cause)

    def restore(self, live: LiveRequest) -> None:
        """The queue has lost a request: one that waits is enqueued again, one that runs goes on without the queue."""
        if live.is_enqueued and live.lifecycle.state is RequestState.QUEUED:
            self._background.spawn(self._restore(live, self.entry_of(live)), "restore")

    async def _restore(self, live: LiveRequest, entry: QueueEntry) -> None:
        with self._store.watched():  # the next heartbeat tells again
            try:
                await self._queue.enqueue(entry, max_length=_NO_LIMIT)
            except DuplicateRequestError:  # it is known again
                return
            _log.info("request_restored", request_id=live.fleet_id)
            self.kick()
            if live.lifecycle.is_ended:
                await self._queue.finish(live.fleet_id)

    # What sessions tell

    def on_tokens(self, worker_id: str, event: TokensEvent) -> None:
        """Hands new tokens to the stream; those of an attempt that is over are dropped."""
        request_id, attempt, token_ids, _, finish_reason, _ = event
        live = self._live.get(request_id)
        if live is None or not live.is_running_on(worker_id, attempt) or live.claim is None:
            self.on_late_tokens(len(token_ids))
            return
        if finish_reason is FinishReason.CANCELLED:
            # Nobody here asked for it: the worker gave the request up, e.g. at the end of its drain.
            session = self._fleet.session(worker_id, live.claim.worker_epoch)
            self.on_late_tokens(len(token_ids))
            is_draining = session is not None and session.state is WorkerState.DRAINING
            self._resume(live, live.claim, "given_up", is_loss=not is_draining)
            return
        if live.belief is not None or finish_reason is not None:
            self._affinity.heard(live, live.claim, event)
        now = self._clock.monotonic()
        if token_ids:
            if live.last_token_at is not None:
                self._metrics.of_band(live.request.band).itl.observe(now - live.last_token_at)
            self.output_meter.add(live.flow, len(token_ids))
        live.receive(event, now)
        if not live.is_paused and live.mailbox.num_unread_tokens >= self._settings.max_unread_tokens:
            self.set_paused(live, True)

    def on_late_tokens(self, num_tokens: int) -> None:
        """A worker has made tokens before it knew that nobody wants them."""
        self._metrics.late_tokens.inc(num_tokens)

    def on_rejected(self, worker_id: str, event: RejectedEvent) -> None:
        """Puts a refused request back, or ends it if it can never be served."""
        live = self._live.get(event.request_id)
        if live is None or not live.is_running_on(worker_id, event.attempt) or live.claim is None:
            return
        if event.reason in _REFUSALS:
            self._return_to_queue(live, live.claim, Place.SAME, _CAUSE[event.reason])
            return
        live.claim = None
        live.end(failed(_rejection(event)))

    def on_handed_back(self, worker_id: str, request_id: str, attempt: int) -> None:
        """Lets a long request that found no memory wait behind fresh work, for whichever worker has some."""
        live = self._live.get(request_id)
        if live is not None and live.is_running_on(worker_id, attempt) and live.claim is not None:
            live.num_hand_backs += 1
            self._return_to_queue(live, live.claim, Place.LAST, "handed_back")

    def on_usage(self, worker_id: str, usage: BlockUsage) -> None:
        """Passes a worker's numbers on to the queue."""
        session = self._fleet.latest(worker_id)
        if session is not None:
            self._metrics.set_worker_usage(worker_id, usage)
            self._reports.add(worker_id, session.epoch, session.limits, usage)
            if self._reporting is None:  # with others that come soon, unless something else is dispatched before
                delay_s = _REPORT_DELAY_S if self._waiting else _IDLE_REPORT_DELAY_S
                self._reporting = asyncio.get_running_loop().call_later(delay_s, self._report)

    def _report(self) -> None:
        self._reporting = None
        if len(self._reports):
            self.kick()

    def on_ready(self, session: WorkerSession, model: ServedModel) -> bool:
        """Takes a session into the fleet. False if a session with that start of the worker is there already."""
        is_new = self._fleet.add(session, model)
        if is_new:
            self._affinity.add(session)
            _log.info("worker_ready", worker_id=session.worker_id, epoch=session.epoch, model=model.limits.model)
            self._show_sessions()
        return is_new

    def on_change(self) -> None:
        """A session's state changed."""
        self._fleet.refresh()
        self._show_sessions()

    def on_end(self, worker_id: str, epoch: int, state: WorkerState) -> None:
        """Requeues everything that this start of the worker had from here."""
        self._fleet.remove(worker_id, epoch)
        self._reports.forget(worker_id, epoch)
        self._affinity.remove(worker_id, epoch)
        self._show_sessions()
        if self._fleet.latest(worker_id) is None:
            self._metrics.forget_worker(worker_id)
        _log.log(30 if state is WorkerState.LOST else 20, "worker_gone", worker_id=worker_id, state=state.value)
        for live in self.live:
            claim = live.claim
            is_there = claim is not None and (claim.worker_id, claim.worker_epoch) == (worker_id, epoch)
            if claim is not None and is_there and not live.lifecycle.is_ended:
                is_loss = state is WorkerState.LOST
                self._resume(live, claim, "worker_lost" if is_loss else "worker_closed", is_loss=is_loss)
        self._background.spawn(self._forget_worker(worker_id, epoch), "forget_worker")

    async def _forget_worker(self, worker_id: str, epoch: int) -> None:
        try:
            await self._queue.forget_worker(worker_id, epoch=epoch)
        except UnavailableError as error:  # its numbers expire by themselves
            self._store.failed(error)

    def _show_sessions(self) -> None:
        for state in WorkerState:
            self._metrics.sessions.labels(state.value).set(sum(s.state is state for s in self._fleet.sessions))
        self._background.spawn(self.reach.tell(), "reach")

    # Loops

    async def _dispatch_loop(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            run = self._run or self._begin_run()
            try:
                claims = await run.claims
            except UnavailableError as error:
                self._store.failed(error)
                self._reports.give_back(run.reports)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                self._run = None
                self._wake.set()
                continue
            self._run = None
            backoff_s = _FIRST_BACKOFF_S
            self._store.answered()
            self._metrics.dispatches.inc()
            for claim in claims:
                if claim.owner == self._settings.gateway_id:
                    self._accept(claim, is_alone=len(claims) == 1)

    def _begin_run(self) -> _Run:
        reports = self._reports.take()
        self._run = run = _Run(reports, self._queue.dispatch(reports))
        return run

    async def _inbox_loop(self) -> None:
        while True:
            try:
                messages = await self._queue.read_inbox(timeout_s=_INBOX_WAIT_S)
            except UnavailableError as error:
                self._store.failed(error)
                await asyncio.sleep(_MAX_BACKOFF_S)
                continue
            for message in messages:
                if message.claim is not None:
                    self._accept(message.claim, is_alone=len(messages) == 1)
                elif message.kind == "cancel":
                    self._cancel_here(message.request_id)


def _rejection(event: RejectedEvent) -> TidegateError:
    if event.reason is Reason.DEADLINE:
        return DeadlineExceededError(event.message)
    if event.reason in _INVALID_REASONS:
        return InvalidRequestError(event.message, reason=event.reason)
    _log.error("worker_rejected", request_id=event.request_id, reason=event.reason.name, message=event.message)
    return InternalError("a worker could not take the request", reason=Reason.INTERNAL)
