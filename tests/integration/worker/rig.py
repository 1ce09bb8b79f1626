"""A worker's service over real gRPC, with the real engine and its thread; only the model is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.clock import SystemClock
from common.rpc.server import RpcServer, ServerOptions
from common.types import ModelDescription, ModelLimits
from protos.inference.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.support.fake_executor import FakeExecutor
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.batch import Batch, SampledToken
from worker.engine.engine import Engine
from worker.engine.events import StepOutput
from worker.engine.loop import EngineLoop
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.rpc.fleet_key import FleetKey
from worker.rpc.identity import Identity
from worker.rpc.service import SERVICE_NAME, Serving, WorkerService, register

VOCAB_SIZE = 1000
BLOCK_SIZE = 4
IDENTITY = Identity("w1", 17)
WAIT_S = 120.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns once something in another thread or task has become true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the conditions are the engine thread's, which sets no event
            await asyncio.sleep(0.005)


async def end_of(call: Any) -> grpc.StatusCode:
    """Reads a call to its end, and says which status that is."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


class GatedExecutor(FakeExecutor):
    """A fake that computes only while its gate is open."""

    def __init__(self, num_blocks: int, vocab_size: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, vocab_size=vocab_size)
        self.is_stepwise = False  # then each step closes the gate behind it
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, batch: Batch) -> list[SampledToken | None]:
        assert self.gate.wait(WAIT_S), "the test left the gate closed"
        if self.is_stepwise:
            self.gate.clear()
        return super().execute(batch)


class WorkerRig:
    """`num_blocks` usable blocks of 4 tokens."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 4,
        fleet_key: str = "",
        tokenizer: bytes = b"{}",
        vocab_size: int = VOCAB_SIZE,
        has_clock: bool = False,
    ) -> None:
        """Without a clock, time stands still for the engine."""
        self.executor = GatedExecutor(num_blocks + 1, vocab_size)
        self.pool = BlockPool(num_blocks + 1)
        manager = CacheManager(self.pool, BLOCK_SIZE, keyed_digest(b"test"))
        limits = ModelLimits("fake", 512, vocab_size, BLOCK_SIZE, num_blocks, max_num_seqs)
        scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs, 64, 32))
        now = SystemClock().monotonic if has_clock else None
        self.engine = Engine(self.executor, scheduler, manager, limits, [], now)
        self.description = ModelDescription(limits, tokenizer, "", (), None, False, "", "")
        self.died = asyncio.Event()
        self.drain_wanted = asyncio.Event()
        self.num_sessions = 0
        key = FleetKey(fleet_key)
        self.service = WorkerService(IDENTITY, key, self._count_sessions, self.drain_wanted.set)
        self.loop = EngineLoop(self.engine, SystemClock(), on_output=self._on_output, on_dead=self._on_dead)
        self._server = RpcServer(ServerOptions(4 << 20, 4 << 20), SystemClock(), {SERVICE_NAME: key.authenticate})
        self._server.add(SERVICE_NAME, register, self.service)
        self.address = ""

    @asynccontextmanager
    async def running(self, *, is_loaded: bool = True) -> AsyncIterator[WorkerRig]:
        """Serves; afterwards the engine's books must add up and hold nothing."""
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1:0')}"
        self.loop.start()
        if is_loaded:
            self.service.serve(Serving(self.loop, self.description))
        try:
            yield self
        finally:
            self.executor.gate.set()
            await self._server.stop(0)
            await self.loop.stop()
        if not self.died.is_set():
            self.engine.check_integrity()
            assert self.engine.num_requests == 0
            assert self.pool.counts.referenced == 0

    async def until_idle(self) -> None:
        """Returns once no request is there and no session is open."""
        await until(lambda: not self.num_sessions and not self.engine.num_requests)

    def _count_sessions(self, count: int) -> None:
        self.num_sessions = count

    def _on_output(self, output: StepOutput, duration_s: float) -> None:
        self.service.on_step(output)

    def _on_dead(self, error: BaseException) -> None:
        self.service.fail()
        self.died.set()


class Gateway:
    """The other end of one session."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.call = worker_pb2_grpc.WorkerStub(channel).Session(metadata=metadata, timeout=WAIT_S)
        self.usage = worker_pb2.BlockUsage()
        self.accounted: list[tuple[str, int]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.num_steps = 0

    async def open(self, gateway_id: str = "g1") -> worker_pb2.Opened:
        """Sends Open and returns the answer."""
        await self.call.write(worker_pb2.SessionCommand(open=worker_pb2.Open(gateway_id=gateway_id)))
        event = await self.read()
        assert event is not None
        assert event.WhichOneof("event") == "opened"
        return event.opened

    async def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> None:
        """Submits attempt 1, or another one."""
        submit = worker_pb2.Submit(
            **{  # type: ignore[arg-type]
                "request_id": request_id,
                "attempt": 1,
                "prompt_token_ids": prompt,
                "sampling": types_pb2.SamplingParams(seed=1, max_tokens=max_tokens),
            }
            | fields
        )
        await self.call.write(worker_pb2.SessionCommand(submit=submit))

    async def abort(self, request_id: str, attempt: int = 1) -> None:
        """Aborts."""
        abort = worker_pb2.Abort(request_id=request_id, attempt=attempt)
        await self.call.write(worker_pb2.SessionCommand(abort=abort))

    async def pause(self, request_id: str, attempt: int = 1) -> None:
        """Lets a request rest."""
        pause = worker_pb2.Pause(request_id=request_id, attempt=attempt)
        await self.call.write(worker_pb2.SessionCommand(pause=pause))

    async def resume(self, request_id: str, attempt: int = 1) -> None:
        """Lets a paused request go on."""
        resume = worker_pb2.Resume(request_id=request_id, attempt=attempt)
        await self.call.write(worker_pb2.SessionCommand(resume=resume))

    async def read(self) -> worker_pb2.SessionEvent | None:
        """The next event, recorded; None at the end."""
        event = await self.call.read()
        if event is grpc.aio.EOF:
            return None
        if event.HasField("step"):
            self.num_steps += 1
            self._record(event.step)
        if event.HasField("rejected"):
            self._end(event.rejected.request_id, event.rejected.attempt, types_pb2.Reason.Name(event.rejected.reason))
        return event

    async def until_heard(self) -> None:
        """Reads until the worker has taken everything that was sent before: nonsense is refused without its engine."""
        await self.submit("nonsense", [1], attempt=0)
        assert await self.read_until_ended("nonsense", 0) == "REASON_INVALID_PARAMETER"

    async def read_until_ended(self, request_id: str, attempt: int = 1) -> str:
        """Reads until a request has ended, and says how."""
        while (request_id, attempt) not in self.ends:
            assert await self.read() is not None, "the session ended early"
        return self.ends[request_id, attempt]

    def _record(self, step: worker_pb2.Step) -> None:
        if step.HasField("usage"):
            assert step.usage.seq >= self.usage.seq
            self.usage = step.usage
            self.accounted += [(claim.request_id, claim.attempt) for claim in step.usage.accounted]
        for output in step.outputs:
            key = (output.request_id, output.attempt)
            assert key not in self.ends, "news after the end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason:
                self._end(*key, types_pb2.FinishReason.Name(output.finish_reason))

    def _end(self, request_id: str, attempt: int, how: str) -> None:
        assert (request_id, attempt) not in self.ends, "ended twice"
        self.ends[request_id, attempt] = how
