"""Keeps a session with every worker that is known: those of the configuration and those that announced themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import grpc
import structlog

from common.clock import Clock
from common.errors import UnavailableError
from common.rpc.tls import Dialling
from common.types import ModelDescription
from gateway.background import Background
from gateway.placement.model import ServedModel
from gateway.placement.worker import SessionListener
from gateway.queueing.queue import Queue, WorkerRecord
from gateway.rpc.turns import TurnBudget
from gateway.rpc.worker_session import GrpcWorkerSession, SessionFailedError, SessionSettings, describe
from gateway.store_health import StoreHealth
from gateway.text.tokenizer import TextModel
from protos.inference.v1 import worker_pb2_grpc

_log = structlog.get_logger(__name__)

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 3.0
_OUTPUTS_PER_TURN = 16
"""Of requests, passed on at once: with the writes that follow they take about a millisecond."""


class WorkerDialer:
    """One task for each address. A worker that is no longer announced keeps its session, and is not dialled again."""

    def __init__(
        self,
        addresses: Sequence[str],
        queue: Queue,
        listener: SessionListener,
        background: Background,
        store: StoreHealth,
        clock: Clock,
        settings: SessionSettings,
        *,
        poll_s: float,
        dialling: Dialling,
        channel_options: Sequence[tuple[str, int]],
        random: Random,
    ) -> None:
        """`addresses`: workers to dial in any case. `random` spreads the tries of several gateways."""
        self._fixed = frozenset(addresses)
        self._queue = queue
        self._listener = listener
        self._background = background
        self._store = store
        self._clock = clock
        self._settings = settings
        self._poll_s = poll_s
        self._tls = dialling
        self._channel_options = [
            *channel_options,
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # Several gateways in one process (tests) must not share a connection, whose loss would be everybody's.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._random = random
        self._wanted: frozenset[str] = self._fixed
        self._dialling: set[str] = set()
        self._sessions: dict[str, GrpcWorkerSession] = {}  # by address
        self._models: dict[str, tuple[ModelDescription, TextModel]] = {}  # read last under a name
        self._reading = asyncio.Lock()
        self._turns = TurnBudget(_OUTPUTS_PER_TURN)

    @property
    def sessions(self) -> Mapping[str, GrpcWorkerSession]:
        """Sessions by the address dialled, those that are being opened included."""
        return self._sessions

    def start(self) -> None:
        """Starts the loop."""
        self._background.run(self._loop, "dialer")

    async def _loop(self) -> None:
        while True:
            try:
                self._meet(await self._queue.workers())
                self._store.answered()
            except UnavailableError as error:  # those known so far stay wanted
                self._store.failed(error)
            self._dial_missing()
            await asyncio.sleep(self._poll_s)

    def _meet(self, records: Iterable[WorkerRecord]) -> None:
        announced = {record.address: record for record in records}
        self._wanted = self._fixed | announced.keys()
        for address, session in self._sessions.items():
            record = announced.get(address)
            if record is not None and record.draining and record.epoch == session.epoch:
                session.drain()

    def _dial_missing(self) -> None:
        for address in self._wanted - self._dialling:
            self._dialling.add(address)
            self._background.run(partial(self._keep, address), f"dial {address}")

    async def _keep(self, address: str) -> None:
        """Dials one worker for as long as it is wanted."""
        structlog.contextvars.bind_contextvars(address=address)
        retry_s, is_reported = _MIN_RETRY_S, False
        try:
            while address in self._wanted:
                started = self._clock.monotonic()
                try:
                    # A new connection each time: one that swallows everything would still look like an open one.
                    async with self._tls.channel(address, self._channel_options) as channel:
                        await self._serve(address, channel)
                except SessionFailedError as error:
                    if not is_reported:
                        _log.warning("worker_unreachable", error=str(error))
                    is_reported = True
                else:
                    is_reported = False
                if self._clock.monotonic() - started > _MAX_RETRY_S:
                    retry_s = _MIN_RETRY_S
                await asyncio.sleep(retry_s * self._random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
        finally:
            self._dialling.discard(address)

    async def _serve(self, address: str, channel: grpc.aio.Channel) -> None:
        stub = worker_pb2_grpc.WorkerStub(channel)
        model = await self._read_model(await describe(stub, self._settings))
        session = GrpcWorkerSession(stub, model, self._listener, self._settings, self._turns)
        self._sessions[address] = session
        try:
            await session.run()
        finally:
            del self._sessions[address]

    async def _read_model(self, description: ModelDescription) -> ServedModel:
        """The model with its text side, which is built once for all workers that describe the same."""
        text_only = replace(description, limits=replace(description.limits, num_blocks=0, max_num_seqs=0))
        async with self._reading:  # workers that are met at the same time, too
            known = self._models.get(description.limits.model)
            if known is None or known[0] != text_only:
                try:
                    known = (text_only, await asyncio.to_thread(TextModel, description))
                except ValueError as error:
                    raise SessionFailedError(f"unusable tokenizer: {error}") from error
                self._models[description.limits.model] = known
        return ServedModel(replace(known[0], limits=description.limits), known[1])
