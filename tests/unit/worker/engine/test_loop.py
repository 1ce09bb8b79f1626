"""The bridge: commands in, outputs out on the event loop, health, drain, and a clean or a noticed end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from common.types import FinishReason, Reason, SamplingParams
from tests.support.fake_executor import generate
from tests.unit.worker.engine.rig import SESSION, VOCAB_SIZE, EngineRig
from worker.engine.batch import Batch, SampledToken
from worker.engine.events import RequestOutput, RequestRejected, StepOutput
from worker.engine.loop import EngineLoop

SAMPLING = SamplingParams(seed=1, max_tokens=5)


class SettableClock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Bridge:
    """An engine loop whose outputs land in a queue on the event loop."""

    def __init__(self, rig: EngineRig) -> None:
        self.clock = SettableClock()
        self.outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        self.dead: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.threads: set[int] = set()
        self.loop = EngineLoop(rig.engine, self.clock, on_output=self._on_output, on_dead=self.dead.set_result)

    def _on_output(self, output: StepOutput, elapsed_s: float) -> None:
        assert elapsed_s >= 0
        self.threads.add(threading.get_ident())
        self.outputs.put_nowait(output)

    def submit(self, request_id: str, prompt: Sequence[int] = (1, 2, 3)) -> None:
        self.loop.submit(SESSION, request_id, 1, prompt, SAMPLING)

    async def until_ended(self, request_id: str) -> tuple[list[int], RequestOutput | RequestRejected]:
        """All tokens of a request, and its terminal event."""
        token_ids: list[int] = []
        while True:
            news = (await self.outputs.get()).sessions.get(SESSION)
            for event in news.outputs if news else ():
                if event.request_id == request_id:
                    token_ids += event.token_ids
                    if event.finish_reason is not None:
                        return token_ids, event
            for rejected in news.rejected if news else ():
                if rejected.request_id == request_id:
                    return token_ids, rejected


class Gate:
    """Holds an executor inside a step until it is opened."""

    def __init__(self, rig: EngineRig) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self._execute = rig.executor.execute
        rig.executor.execute = self.execute  # type: ignore[method-assign]

    def execute(self, batch: Batch) -> list[SampledToken | None]:
        self.entered.set()
        assert self.opened.wait(timeout=120)
        return self._execute(batch)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 120)


@asynccontextmanager
async def running(rig: EngineRig) -> AsyncIterator[Bridge]:
    bridge = Bridge(rig)
    bridge.loop.start()
    try:
        yield bridge
    finally:
        await bridge.loop.stop()
        assert "engine" not in {thread.name for thread in threading.enumerate()}


async def test_a_request_goes_in_and_its_tokens_come_out_on_the_event_loop() -> None:
    async with running(EngineRig()) as bridge:
        bridge.submit("r")
        token_ids, end = await bridge.until_ended("r")
        assert token_ids == generate((1, 2, 3), 5, vocab_size=VOCAB_SIZE)
        assert isinstance(end, RequestOutput)
        assert end.finish_reason is FinishReason.LENGTH
        assert bridge.threads == {threading.get_ident()}


async def test_work_that_comes_after_idleness_wakes_the_loop() -> None:
    async with running(EngineRig()) as bridge:
        for index in range(20):
            bridge.submit(f"r{index}")
            await bridge.until_ended(f"r{index}")


async def test_a_refusal_comes_back_as_an_event() -> None:
    async with running(EngineRig(num_blocks=2)) as bridge:
        bridge.submit("never fits", [1] * 50)
        _, end = await bridge.until_ended("never fits")
        assert isinstance(end, RequestRejected)
        assert end.reason is Reason.NEVER_FITS
        assert "the pool has 2" in end.message


async def test_an_abort_while_the_request_is_computed_ends_it_after_that_step() -> None:
    rig = EngineRig()
    gate = Gate(rig)
    async with running(rig) as bridge:
        bridge.submit("r")
        await gate.until_entered()
        bridge.loop.abort(SESSION, "r", 1)
        gate.opened.set()
        token_ids, end = await bridge.until_ended("r")
        assert isinstance(end, RequestOutput)
        assert (len(token_ids), end.finish_reason) == (1, FinishReason.CANCELLED)


async def test_commands_to_a_session_that_is_over_do_no_harm() -> None:
    rig = EngineRig()
    async with running(rig) as bridge:
        bridge.submit("r")
        bridge.loop.abort_session(SESSION)
        bridge.submit("late")
        bridge.loop.abort(SESSION, "r", 1)
        bridge.loop.abort_session(SESSION)
        bridge.loop.open_session(SESSION)
        bridge.submit("fresh")
        token_ids, _ = await bridge.until_ended("fresh")
        assert len(token_ids) == 5
    rig.engine.check_integrity()


async def test_age_grows_while_a_step_hangs_and_is_zero_when_idle() -> None:
    rig = EngineRig()
    gate = Gate(rig)
    async with running(rig) as bridge:
        assert bridge.loop.age_s == 0
        bridge.submit("r")
        await gate.until_entered()
        bridge.clock.now += 7
        assert bridge.loop.age_s == 7
        gate.opened.set()
        await bridge.until_ended("r")
        bridge.clock.now += 7
    assert bridge.loop.age_s == 0


async def test_age_grows_while_steps_compute_nothing_though_requests_wait() -> None:
    rig = EngineRig()
    async with running(rig) as bridge:
        rig.scheduler.schedule = lambda now_s=0.0: Batch(())  # type: ignore[method-assign]
        bridge.submit("r")
        while (await bridge.outputs.get()).stats.waiting == 0:
            pass
        bridge.clock.now += 7
        await bridge.outputs.get()
        assert bridge.loop.age_s == 7


async def test_the_loop_sleeps_while_requests_gather_and_wakes_in_time() -> None:
    rig = EngineRig(mode="client", gather_s=0.05)
    rig.now_s = 100.0  # as the bridge's clock
    async with running(rig) as bridge:
        await bridge.outputs.get()
        bridge.submit("r")
        bridge.submit("company")
        async with asyncio.timeout(60):
            while rig.engine.num_requests < 2:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.001)
        assert rig.executor.batches == [], "nothing is computed while they gather"
        rig.now_s += 1
        token_ids, _ = await bridge.until_ended("r")
        assert len(token_ids) == 5
        assert rig.executor.batches[0] == [("r", 3), ("company", 3)]


async def test_a_broken_executor_is_noticed_and_ends_waiting_for_it() -> None:
    rig = EngineRig()
    rig.executor.error = RuntimeError("device lost")
    async with running(rig) as bridge:
        assert bridge.loop.dead is None
        bridge.submit("r")
        error = await bridge.dead
        assert str(error) == "device lost"
        assert bridge.loop.dead is error
        await bridge.loop.drain()
        bridge.submit("nobody hears it")


async def test_drain_finishes_what_is_there_and_refuses_the_rest() -> None:
    rig = EngineRig()
    gate = Gate(rig)
    async with running(rig) as bridge:
        bridge.submit("r")
        await gate.until_entered()
        draining = asyncio.ensure_future(bridge.loop.drain())
        await asyncio.sleep(0)  # lets the task send its command
        bridge.submit("late")
        assert not draining.done()
        gate.opened.set()
        await draining
        outputs = [bridge.outputs.get_nowait() for _ in range(bridge.outputs.qsize())]
        news = [output.sessions[SESSION] for output in outputs if SESSION in output.sessions]
        assert [rejected.reason for one in news for rejected in one.rejected] == [Reason.DRAINING]
        assert sum(len(event.token_ids) for one in news for event in one.outputs) == 5
    assert rig.engine.num_requests == 0


async def test_stop_does_not_wait_for_requests() -> None:
    rig = EngineRig()
    async with running(rig) as bridge:
        bridge.loop.submit(SESSION, "long", 1, [1], SamplingParams(seed=1, max_tokens=200))
        await bridge.outputs.get()
    assert rig.engine.num_requests <= 1
    assert bridge.loop.dead is None


async def test_a_loop_that_never_started_can_be_stopped() -> None:
    await Bridge(EngineRig()).loop.stop()


@pytest.mark.parametrize("num_requests", [18])
async def test_many_requests_at_once_get_one_end_each(num_requests: int) -> None:
    rig = EngineRig(num_blocks=12)
    async with running(rig) as bridge:
        for index in range(num_requests):
            bridge.submit(f"r{index}", [index] * 5)
        ends: dict[str, int] = {}
        while len(ends) < num_requests:
            news = (await bridge.outputs.get()).sessions.get(SESSION)
            for event in news.outputs if news else ():
                if event.finish_reason is not None:
                    ends[event.request_id] = ends.get(event.request_id, 0) + 1
        assert set(ends.values()) == {1}
    rig.engine.check_integrity()
    rig.assert_idle()
