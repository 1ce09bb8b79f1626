"""The Worker service: who may call, one session per gateway, and the model's description."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from common.errors import InvalidRequestError, UnavailableError
from common.types import ModelDescription, Reason
from protos.inference.v1 import worker_pb2, worker_pb2_grpc
from worker.engine.events import StepOutput
from worker.rpc import codec
from worker.rpc.fleet_key import FleetKey
from worker.rpc.identity import Identity
from worker.rpc.session import EngineLoop, GatewaySession

_log = structlog.get_logger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
register = worker_pb2_grpc.add_WorkerServicer_to_server


@dataclass(frozen=True, slots=True)
class Serving:
    """What a loaded worker serves with."""

    engine: EngineLoop
    description: ModelDescription


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Refuses everything until `serve` is called or after `fail`, and new sessions after `drain`."""

    def __init__(
        self,
        identity: Identity,
        fleet_key: FleetKey,
        on_sessions: Callable[[int], None] = lambda count: None,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_sessions` is told how many sessions there are whenever that changes; `on_drain` is called when a gateway
        asks the whole worker to drain."""
        self._identity = identity
        self._fleet_key = fleet_key
        self._on_sessions = on_sessions
        self._on_drain = on_drain
        self._serving: Serving | None = None
        self._is_draining = False
        self._ids = itertools.count(1)
        self._sessions: dict[int, GatewaySession] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def serve(self, serving: Serving) -> None:
        """The model is loaded: takes sessions from here on."""
        self._serving = serving

    def on_step(self, output: StepOutput) -> None:
        """Gives each session its news of one engine step; sessions that have ended meanwhile get none."""
        for session_id, news in output.sessions.items():
            session = self._sessions.get(session_id)
            if session is not None:
                session.on_output(news)

    def fail(self) -> None:
        """The engine is dead: ends every session as lost, and takes no new one."""
        self._serving = None
        for session in self._sessions.values():
            session.fail()

    async def drain(self) -> None:
        """Takes no new session or request, and returns when every session has said goodbye."""
        self._is_draining = True
        for session in self._sessions.values():
            session.drain()
        await self._is_empty.wait()

    async def hand_back(self) -> None:
        """The drain has lasted long enough: gives what still runs back to its gateways, and returns when they know."""
        for session in self._sessions.values():
            session.hand_back()
        await self._is_empty.wait()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: Any
    ) -> AsyncIterator[worker_pb2.DescribeResponse]:
        """Streams the serialized Description."""
        self._fleet_key.check_peer(context.peer())
        for chunk in codec.description_to_chunks(self._loaded().description):
            yield worker_pb2.DescribeResponse(chunk=chunk)

    async def Session(  # type: ignore[override]  # writes through the context, which the stubs do not know
        self, request_iterator: AsyncIterator[worker_pb2.SessionCommand], context: Any
    ) -> None:
        """Runs until the gateway or the worker ends it; then the session's requests are aborted, whatever ended it."""
        self._fleet_key.check_peer(context.peer())
        serving = self._loaded()
        if self._is_draining:
            raise UnavailableError("the worker is draining", reason=Reason.DRAINING)
        commands = aiter(request_iterator)
        gateway_id = await _read_open(commands)
        limits = serving.description.limits
        session = GatewaySession(next(self._ids), gateway_id, serving.engine, limits, self._on_drain)
        self._add(session)
        try:
            session.open()
            opened = worker_pb2.Opened(
                worker_id=self._identity.worker_id,
                epoch=self._identity.epoch,
                limits=codec.limits_to_proto(limits),
            )
            await context.write(worker_pb2.SessionEvent(opened=opened))
            if self._is_draining:  # begun while the open was on its way
                session.drain()
            await _until_one_ends(session.read(commands), session.write(context.write), session.failure())
        finally:
            session.close()
            self._remove(session)

    def _loaded(self) -> Serving:
        if self._serving is None:
            raise UnavailableError(
                "the worker is loading its model, or its engine has broken", reason=Reason.NO_WORKERS
            )
        return self._serving

    def _add(self, session: GatewaySession) -> None:
        self._sessions[session.session_id] = session
        self._is_empty.clear()
        self._on_sessions(len(self._sessions))
        _log.info("session_opened", session_id=session.session_id, gateway_id=session.gateway_id)

    def _remove(self, session: GatewaySession) -> None:
        del self._sessions[session.session_id]
        if not self._sessions:
            self._is_empty.set()
        self._on_sessions(len(self._sessions))
        _log.info("session_closed", session_id=session.session_id, gateway_id=session.gateway_id)


async def _read_open(commands: AsyncIterator[worker_pb2.SessionCommand]) -> str:
    """The gateway's id out of the first command. Raises InvalidRequestError if that is not an Open."""
    command = await anext(commands, None)
    if command is None or command.WhichOneof("command") != "open":
        raise InvalidRequestError.of_field("open", "must be the first command of a session")
    if not 1 <= len(command.open.gateway_id) <= codec.MAX_ID_BYTES:
        raise InvalidRequestError.of_field("open.gateway_id", f"must have 1 to {codec.MAX_ID_BYTES} characters")
    return command.open.gateway_id


async def _until_one_ends(*parts: Any) -> None:
    """Runs coroutines until one ends, cancels the others, and raises what the ended ones raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
