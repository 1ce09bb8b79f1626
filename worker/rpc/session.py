"""One gateway's session: commands go to the engine, the engine's news to the mailbox, its end aborts its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from common.errors import InvalidRequestError, UnavailableError
from common.types import Band, ModelLimits, Reason, SamplingParams
from protos.inference.v1 import types_pb2, worker_pb2
from worker.engine.events import RequestRejected, SessionOutput
from worker.rpc import codec
from worker.rpc.mailbox import Mailbox

_log = structlog.get_logger(__name__)

HEARTBEAT_S = 0.5
"""A session without news says this often that it is there, and how old the engine loop's last progress is."""


class EngineLoop(Protocol):
    """The engine's thread as the event loop sees it: nothing here blocks, answers come with a step's output."""

    @property
    def age_s(self) -> float:
        """Seconds since the loop last made progress or was idle."""
        ...

    def open_session(self, session_id: int) -> None:
        """Makes a session known; it is told the block usage at once."""
        ...

    def submit(
        self,
        session_id: int,
        request_id: str,
        attempt: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_token_ids: Sequence[int],
        band: Band,
        cache_salt: str,
        timeout_s: float | None,
        may_hand_back: bool,
    ) -> None:
        """Gives a request to the engine; what it refuses comes back as rejected."""
        ...

    def abort(self, session_id: int, request_id: str, attempt: int) -> None:
        """Ends a request; nothing if it is not there."""
        ...

    def set_paused(self, session_id: int, request_id: str, attempt: int, is_paused: bool) -> None:
        """Stops computing for a request, or goes on with it; nothing if it is not there."""
        ...

    def abort_session(self, session_id: int) -> None:
        """Ends a session and all its requests, without further events."""
        ...


class GatewaySession:
    """Lives from a gateway's Open to the end of its stream, whatever ends it. Used on the event loop only."""

    def __init__(
        self,
        session_id: int,
        gateway_id: str,
        engine: EngineLoop,
        limits: ModelLimits,
        on_drain: Callable[[], None],
    ) -> None:
        """`on_drain` is called when the gateway asks the whole worker to drain."""
        self.session_id = session_id
        self.gateway_id = gateway_id
        self._engine = engine
        self._limits = limits
        self._on_drain = on_drain
        self._mailbox = Mailbox()
        self._live: set[tuple[str, int]] = set()  # submitted and not ended
        self._usage: worker_pb2.BlockUsage | None = None  # the latest, to be repeated in heartbeats
        self._is_draining = False
        self._is_failed = asyncio.Event()

    def __repr__(self) -> str:
        return f"GatewaySession({self.session_id}, gateway={self.gateway_id}, live={len(self._live)}, {self._mailbox})"

    def open(self) -> None:
        """Makes the session known to the engine."""
        self._engine.open_session(self.session_id)

    def close(self) -> None:
        """Aborts everything the session asked for."""
        self._engine.abort_session(self.session_id)

    def on_output(self, output: SessionOutput) -> None:
        """Takes the news of one engine step."""
        self._mailbox.put_outputs(codec.output_to_proto(each) for each in output.outputs)
        self._live.difference_update((each.request_id, each.attempt) for each in output.outputs if each.finish_reason)
        for rejected in output.rejected:
            self._mailbox.put_rejected(codec.rejected_to_proto(rejected))
            self._live.discard((rejected.request_id, rejected.attempt))
        for handed_back in output.handed_back:
            self._mailbox.put_handed_back(codec.handed_back_to_proto(handed_back))
            self._live.discard((handed_back.request_id, handed_back.attempt))
        if output.usage is not None:
            usage = codec.usage_to_proto(output.usage)
            self._usage = worker_pb2.BlockUsage()
            self._usage.CopyFrom(usage)
            del self._usage.accounted[:]
            self._mailbox.put_usage(usage)
        self._say_goodbye_if_done()

    def drain(self) -> None:
        """Takes no new requests, and says goodbye when the accepted ones have ended."""
        if not self._is_draining:
            self._is_draining = True
            self._say_goodbye_if_done()

    def hand_back(self) -> None:
        """Says goodbye although requests are left: their gateway goes on with them elsewhere."""
        self._mailbox.put_goodbye(types_pb2.REASON_DRAINING)

    def fail(self) -> None:
        """Makes `failure` raise: nothing more can come."""
        self._is_failed.set()

    async def failure(self) -> None:
        """Waits for `fail`; raises UnavailableError then."""
        await self._is_failed.wait()
        raise UnavailableError("the worker's engine has broken", reason=Reason.WORKER_LOST)

    async def read(self, commands: AsyncIterator[worker_pb2.SessionCommand]) -> None:
        """Obeys until the gateway's end of the stream closes. Raises InvalidRequestError for what is no command."""
        async for first in commands:
            for command in (first, *first.more):
                self._obey(command)
                await self._mailbox.room()

    async def write(self, send: Callable[[worker_pb2.SessionEvent], Awaitable[None]]) -> None:
        """Sends news as they come and heartbeats while there are none; returns after a goodbye.

        While `send` waits for a slow gateway, news merge in the mailbox.
        """
        while True:
            event = await self._next_event()
            if event.HasField("step"):
                event.step.loop_age_s = self._engine.age_s
            await send(event)
            if event.HasField("goodbye"):
                return

    async def _next_event(self) -> worker_pb2.SessionEvent:
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                return await self._mailbox.take()
        except TimeoutError:
            return worker_pb2.SessionEvent(step=worker_pb2.Step(usage=self._usage))

    def _obey(self, command: worker_pb2.SessionCommand) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.submit)
            case "abort":
                self._engine.abort(self.session_id, command.abort.request_id, command.abort.attempt)
            case "pause":
                self._engine.set_paused(self.session_id, command.pause.request_id, command.pause.attempt, True)
            case "resume":
                self._engine.set_paused(self.session_id, command.resume.request_id, command.resume.attempt, False)
            case "drain" if command.drain.whole_worker:
                _log.info("drain_asked_for", gateway_id=self.gateway_id)
                self._on_drain()
            case "drain":
                self.drain()
            case "open":
                raise InvalidRequestError.of_field("open", "the session is open; open is sent once, first")
            case _:
                raise InvalidRequestError.of_field("command", "must be set: submit, abort, pause, resume or drain")

    def _submit(self, message: worker_pb2.Submit) -> None:
        key = (message.request_id, message.attempt)
        if self._is_draining:
            self._reject(message, Reason.DRAINING, "the worker is draining and takes no new request")
        elif key in self._live:
            self._reject(message, Reason.DUPLICATE_REQUEST_ID, "this attempt of the request is running")
        else:
            try:
                submission = codec.submission_from_proto(message, self._limits)
            except InvalidRequestError as error:
                self._reject(message, error.reason, error.message)
                return
            self._live.add(key)
            self._engine.submit(
                self.session_id,
                submission.request_id,
                submission.attempt,
                submission.prompt_token_ids,
                submission.sampling,
                output_token_ids=submission.output_token_ids,
                band=submission.band,
                cache_salt=submission.cache_salt,
                timeout_s=submission.timeout_s,
                may_hand_back=submission.may_hand_back,
            )

    def _reject(self, message: worker_pb2.Submit, reason: Reason, text: str) -> None:
        rejected = RequestRejected(message.request_id, message.attempt, reason, text)
        self._mailbox.put_rejected(codec.rejected_to_proto(rejected))

    def _say_goodbye_if_done(self) -> None:
        if self._is_draining and not self._live:
            self._mailbox.put_goodbye(types_pb2.REASON_DRAINING)
