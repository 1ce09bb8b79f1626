"""One session with one worker over gRPC: tasks that read events, pass them on, write commands, watch for silence."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from common.errors import UnavailableError
from common.rpc.fleet_key import fleet_metadata
from common.rpc.stream_writer import StreamWriter
from common.types import BlockUsage, ClaimRef, ModelDescription, ModelLimits, Reason
from gateway.placement.model import ServedModel
from gateway.placement.worker import RejectedEvent, SessionListener, Submission, WorkerState
from gateway.rpc import worker_codec
from gateway.rpc.turns import TurnBudget
from gateway.rpc.worker_codec import ProtocolError
from protos.inference.v1 import worker_pb2, worker_pb2_grpc

_log = structlog.get_logger(__name__)

_MAX_ADDED_BYTES = 1 << 16  # to a message with a command: far less than a worker takes
_MAX_WAITING_EVENTS = 64  # read and not yet passed on; then the worker is read no further

# Looks of the watchdog within the allowed silence: it is noticed at most a fifth too early, and late by no more than
# this program's event loop is at the last look.
_TICKS = 5


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a session is opened and watched; see GatewaySettings."""

    gateway_id: str
    fleet_key: str
    silence_s: float
    max_loop_age_s: float
    connect_timeout_s: float


class SessionFailedError(Exception):
    """The worker could not be reached or does not speak the protocol; the message says which."""


async def describe(stub: Any, settings: SessionSettings) -> ModelDescription:
    """Asks a worker for its model. Raises SessionFailedError."""
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            call = stub.Describe(worker_pb2.DescribeRequest(), metadata=fleet_metadata(settings.fleet_key))
            return worker_codec.decode_description(b"".join([message.chunk async for message in call]))
    except TimeoutError as error:
        raise SessionFailedError("no description in time") from error
    except grpc.aio.AioRpcError as error:
        raise SessionFailedError(f"{error.code().name}: {error.details()}") from error
    except ProtocolError as error:
        raise SessionFailedError(f"bad description: {error}") from error


class GrpcWorkerSession:
    """A `WorkerSession`. Lives from the open to the end of its stream; `run` is its whole life.

    On the wire each submission has an id of its own, `<request id>#<number>`: a request id may be used again while
    events of its former use are still on the way, and these must not be taken for the new one's.
    """

    def __init__(
        self,
        stub: worker_pb2_grpc.WorkerAsyncStub,
        model: ServedModel,
        listener: SessionListener,
        settings: SessionSettings,
        turns: TurnBudget,
    ) -> None:
        """`turns`: for the outputs that all sessions of this gateway pass on."""
        self._stub = stub
        self._model = model
        self._listener = listener
        self._settings = settings
        self._turns = turns
        self._worker_id = ""
        self._epoch = 0
        self._limits = model.limits
        self._state = WorkerState.CONNECTING
        self._is_announced = False  # to the listener
        self._commands: asyncio.Queue[worker_pb2.SessionCommand] = asyncio.Queue()  # that wait for others to be written
        self._writer: StreamWriter | None = None  # once the stream is open
        self._numbers = itertools.count(1)
        self.usage: BlockUsage | None = None  # as the worker said last
        self._current: dict[str, tuple[str, int]] = {}  # request id -> wire id and attempt of its latest submission
        self._request_ids: dict[str, str] = {}  # wire id -> request id, of the same
        self._unheard: set[str] = set()  # wire ids of those that have produced nothing yet
        self._arrived: asyncio.Queue[worker_pb2.SessionEvent | None] = asyncio.Queue(_MAX_WAITING_EVENTS)
        self._is_read = False  # to the end
        self._num_silent_ticks = 0

    def __repr__(self) -> str:
        return f"GrpcWorkerSession({self._worker_id or '?'}, {self._state.value}, running={len(self._current)})"

    @property
    def worker_id(self) -> str:
        """The worker's id, once the session is open."""
        return self._worker_id

    @property
    def epoch(self) -> int:
        """The worker's start, once the session is open."""
        return self._epoch

    @property
    def state(self) -> WorkerState:
        """Where the session is."""
        return self._state

    @property
    def limits(self) -> ModelLimits:
        """What the worker's model and pool allow."""
        return self._limits

    def submit(self, submission: Submission, *, is_alone: bool) -> None:
        """Sends it, at once if it is alone. Raises UnavailableError if the session is over."""
        if self._state not in (WorkerState.READY, WorkerState.DRAINING):
            raise UnavailableError(f"worker {self._worker_id} is {self._state.value}", reason=Reason.WORKER_LOST)
        wire_id = f"{submission.request_id}#{next(self._numbers)}"
        if submission.request_id in self._current:
            self._forget(submission.request_id)
        self._current[submission.request_id] = (wire_id, submission.attempt)
        self._request_ids[wire_id] = submission.request_id
        self._unheard.add(wire_id)
        command = worker_codec.encode_submit(submission, wire_id)
        if is_alone and self._writer is not None and self._writer.is_free and self._commands.empty():
            self._writer.begin(command)
        else:
            self._commands.put_nowait(command)

    def abort(self, request_id: str, attempt: int) -> None:
        """Tells the worker to stop it; its later events are dropped here."""
        wire_id, current_attempt = self._current.get(request_id, ("", 0))
        if current_attempt == attempt:
            self._forget(request_id)
            abort = worker_pb2.Abort(request_id=wire_id, attempt=attempt)
            self._commands.put_nowait(worker_pb2.SessionCommand(abort=abort))

    def set_paused(self, request_id: str, attempt: int, is_paused: bool) -> None:
        """Tells the worker to compute nothing more for it, or to go on."""
        wire_id, current_attempt = self._current.get(request_id, ("", 0))
        if current_attempt != attempt:
            return
        if is_paused:
            command = worker_pb2.SessionCommand(pause=worker_pb2.Pause(request_id=wire_id, attempt=attempt))
        else:
            command = worker_pb2.SessionCommand(resume=worker_pb2.Resume(request_id=wire_id, attempt=attempt))
        self._commands.put_nowait(command)

    def drain(self) -> None:
        """The worker takes no new requests: it says so, or is said to."""
        if self._state is WorkerState.READY:
            self._state = WorkerState.DRAINING
            self._listener.on_change()

    def drain_worker(self) -> None:
        """Tells the worker to drain in all its sessions and then to end."""
        self.drain()
        self._commands.put_nowait(worker_pb2.SessionCommand(drain=worker_pb2.Drain(whole_worker=True)))

    async def run(self) -> None:
        """Opens the session and passes on what comes, until it ends. Raises SessionFailedError unless it was open."""
        call = self._stub.Session(metadata=fleet_metadata(self._settings.fleet_key))
        helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch(call))]
        failure = "the stream ended"
        try:
            events = aiter(call)
            await self._open(events)
            reading = asyncio.create_task(self._read(events))
            helpers.append(reading)
            await self._pass_on()
            await reading
            self._close_if_draining()
        except grpc.aio.AioRpcError as error:
            failure = f"{error.code().name}: {error.details()}"
            self._close_if_draining()
        except TimeoutError:
            failure = "not opened in time"
        except ProtocolError as error:
            failure = str(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # this gateway stops: nobody here needs to be told
                self._state, self._is_announced = WorkerState.CLOSED, False
                raise
            failure = "cut by the watchdog"
        finally:
            call.cancel()
            for helper in helpers:
                helper.cancel()
            self._end()
            await asyncio.gather(*helpers, return_exceptions=True)
        if not self._is_announced:
            raise SessionFailedError(failure)
        _log.info("session_ended", state=self._state.value, cause=failure)

    async def _open(self, events: AsyncIterator[worker_pb2.SessionEvent]) -> None:
        self._commands.put_nowait(worker_pb2.SessionCommand(open=worker_pb2.Open(gateway_id=self._settings.gateway_id)))
        async with asyncio.timeout(self._settings.connect_timeout_s):
            first = await anext(events, None)
        if first is None or not first.HasField("opened"):
            raise ProtocolError("the first event is not Opened")
        self._worker_id, self._epoch = first.opened.worker_id, first.opened.epoch
        structlog.contextvars.bind_contextvars(worker_id=self._worker_id)
        self._limits = worker_codec.decode_limits(first.opened.limits)
        if self._limits.model != self._model.limits.model:
            raise ProtocolError(f"described {self._model.limits.model}, opened {self._limits.model}")
        self._num_silent_ticks = 0
        self._state = WorkerState.READY
        if not self._listener.on_ready(self, self._model):
            self._state = WorkerState.CONNECTING
            raise ProtocolError(f"a session with worker {self._worker_id} is open already")
        self._is_announced = True

    async def _read(self, events: AsyncIterator[worker_pb2.SessionEvent]) -> None:
        """Takes in events ahead of their passing on, which keeps their order. Raises what ends the stream."""
        try:
            async for event in events:
                self._num_silent_ticks = 0
                if self._unheard and event.HasField("step"):
                    self._pass_first_outputs(event.step)
                await self._arrived.put(event)
        finally:
            self._is_read = True
            if self._arrived.empty():
                self._arrived.put_nowait(None)  # for who waits

    async def _pass_on(self) -> None:
        """Passes on events until the last that was read."""
        while not (self._is_read and self._arrived.empty()):
            event = await self._arrived.get()
            if event is not None:
                await self._on_event(event)

    def _pass_first_outputs(self, step: worker_pb2.Step) -> None:
        """A request's first token does not wait for those of others, however many there are to be passed on."""
        outputs = step.outputs
        first = [number for number, output in enumerate(outputs) if output.request_id in self._unheard]
        for number in reversed(first):
            self._on_output(outputs[number])
            del outputs[number]

    def _close_if_draining(self) -> None:
        """The worker itself has ended the stream, as a drain does at its bound: it hands back what it still has."""
        if self._state is WorkerState.DRAINING:
            self._state = WorkerState.CLOSED

    def _end(self) -> None:
        if self._state is not WorkerState.CLOSED:
            self._state = WorkerState.LOST
        self._current.clear()
        self._request_ids.clear()
        self._unheard.clear()
        if self._is_announced:
            self._listener.on_end(self._worker_id, self._epoch, self._state)

    async def _on_event(self, event: worker_pb2.SessionEvent) -> None:
        match event.WhichOneof("event"):
            case "step":
                await self._on_step(event.step)
            case "rejected":
                self._on_rejected(event.rejected)
            case "handed_back":
                request_id = self._request_ids.get(event.handed_back.request_id)
                if request_id is not None:
                    self._forget(request_id)
                    self._listener.on_handed_back(self._worker_id, request_id, event.handed_back.attempt)
            case "goodbye":
                is_planned = worker_codec.decode_reason(event.goodbye.reason) is Reason.DRAINING
                self._state = WorkerState.CLOSED if is_planned else WorkerState.LOST
            case kind:
                raise ProtocolError(f"unexpected event {kind}")

    async def _on_step(self, step: worker_pb2.Step) -> None:
        on_output, outputs, begin = self._on_output, step.outputs, 0
        while begin < len(outputs):
            end = begin + await self._turns.take(len(outputs) - begin)
            for output in outputs[begin:end]:  # the inner loop: once for every token
                on_output(output)
            begin = end
        if step.HasField("usage"):
            accounted = tuple(self._claim_refs(step.usage))
            self.usage = worker_codec.decode_usage(step.usage, accounted)
            self._listener.on_usage(self._worker_id, self.usage)
        if step.loop_age_s > self._settings.max_loop_age_s:
            raise ProtocolError(f"the engine loop has made no progress for {step.loop_age_s:.1f} s")

    def _on_output(self, output: worker_pb2.RequestOutput) -> None:
        wire_id = output.request_id
        request_id = self._request_ids.get(wire_id)
        if request_id is None:  # that submission is no longer of interest
            self._listener.on_late_tokens(len(output.token_ids))
            return
        self._unheard.discard(wire_id)
        event = worker_codec.decode_output(output, request_id)
        if event.finish_reason is not None:
            self._forget(request_id)
        self._listener.on_tokens(self._worker_id, event)

    def _on_rejected(self, rejected: worker_pb2.Rejected) -> None:
        request_id = self._request_ids.get(rejected.request_id)
        reason = worker_codec.decode_reason(rejected.reason)
        if reason is Reason.DRAINING:
            self.drain()
        if request_id is not None:
            self._forget(request_id)
            event = RejectedEvent(request_id, rejected.attempt, reason, rejected.message)
            self._listener.on_rejected(self._worker_id, event)

    def _forget(self, request_id: str) -> None:
        """What still comes of its latest submission is of no interest."""
        wire_id, _ = self._current.pop(request_id)
        del self._request_ids[wire_id]
        self._unheard.discard(wire_id)

    def _claim_refs(self, usage: worker_pb2.BlockUsage) -> list[ClaimRef]:
        refs = []
        for ref in usage.accounted:
            request_id = ref.request_id.rpartition("#")[0]
            known = self._current.get(request_id)
            # The claim of a former use of the id is gone with it; naming it would undo the present one's.
            if known is None or known[0] == ref.request_id:
                refs.append(ClaimRef(request_id, ref.attempt))
        return refs

    async def _write(self, call: Any) -> None:
        writer = self._writer = StreamWriter(call)
        try:
            command = await self._commands.get()
            while True:
                following = self._add_waiting(command)
                await writer.write(command)
                command = following or await self._commands.get()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over, which the reader learns with the cause

    def _add_waiting(self, first: worker_pb2.SessionCommand) -> worker_pb2.SessionCommand | None:
        """Puts what waits behind a command into its message, and returns the first one that has no room there."""
        num_bytes = 0
        while not self._commands.empty():
            command = self._commands.get_nowait()
            num_bytes += command.ByteSize()
            if num_bytes > _MAX_ADDED_BYTES:
                return command
            first.more.append(command)
        return None

    async def _watch(self, call: Any) -> None:
        """Cuts the stream after too long a silence. Counts looks, not time: a stall of this process is no silence.

        Looks keep to their times, so one that is late does not put off the others, and several that a stall has
        swallowed are one.
        """
        loop, tick_s = asyncio.get_running_loop(), self._settings.silence_s / _TICKS
        next_at = loop.time()
        while True:
            next_at += tick_s
            if next_at <= loop.time():
                next_at = loop.time() + tick_s
            await asyncio.sleep(next_at - loop.time())
            if self._state is WorkerState.CONNECTING:
                continue
            self._num_silent_ticks += 1
            if self._num_silent_ticks >= _TICKS:
                _log.warning("worker_silent", worker_id=self._worker_id, silence_s=self._settings.silence_s)
                call.cancel()
                return
