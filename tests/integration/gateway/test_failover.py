"""Workers in processes of their own that are killed, stopped, cut off and drained while they answer."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest

from gateway.app import GatewayApp
from protos.inference.v1 import types_pb2
from tests.integration.gateway.processes import Wire, WorkerProcess, scripted_worker_process
from tests.integration.gateway.rig import Answer, Client, Rig, announce, eventually, generate_request, read, reason_of
from tests.support.scripted_worker import MODEL, ScriptedWorker, text_of

NUM_TOKENS = 400


@dataclass
class Pair:
    """A gateway whose first worker can be harmed while the second waits to be announced."""

    app: GatewayApp
    client: Client
    first: WorkerProcess
    wire: Wire
    second: ScriptedWorker

    async def run_until_streaming(self, *requests: Any) -> list[asyncio.Task[Answer]]:
        """Streams that all have some tokens from the first worker."""
        asked = [asyncio.create_task(read(self.client.generate(request, timeout=120))) for request in requests]
        live = lambda: self.app.dispatcher.live  # noqa: E731
        await eventually(lambda: len(live()) == len(asked) and all(len(it.output_token_ids) > 5 for it in live()))
        await announce(self.app, self.second)
        await eventually(lambda: self.app.fleet.num_ready(MODEL) == 2)
        return asked


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def pair(rig: Rig, stack: AsyncExitStack, folder: Path, settings: dict[str, Any], **worker: Any) -> Pair:
    # So slow that it never ends a request before it is harmed.
    fields = {"worker_id": "first", "step_s": 0.05, **worker}
    first = await stack.enter_async_context(scripted_worker_process(folder, **fields))
    wire = await stack.enter_async_context(Wire(first.address))
    app = await rig.gateway(workers=wire.address, **settings)
    client = await rig.client(app)
    await client.wait_serving()
    return Pair(app, client, first, wire, await rig.worker(worker_id="second"))


HARMS: dict[str, Callable[[Pair], None]] = {
    "killed": lambda pair: pair.first.send(signal.SIGKILL),
    "stopped": lambda pair: pair.first.send(signal.SIGSTOP),
    "black hole": lambda pair: pair.wire.become_black_hole(),
}


@pytest.mark.parametrize("harm", HARMS)
async def test_streams_go_on_elsewhere_as_if_nothing_had_happened(
    rig: Rig, stack: AsyncExitStack, tmp_path: Path, harm: str
) -> None:
    fleet = await pair(rig, stack, tmp_path, {"worker_silence_s": 2.5})
    sampling = {"max_tokens": NUM_TOKENS, "logprobs": 0}
    requests = [generate_request(f"story {n}", sampling=sampling, return_token_ids=True) for n in range(3)]
    asked = await fleet.run_until_streaming(*requests)
    HARMS[harm](fleet)
    answers = await asyncio.gather(*asked)
    for number, answer in enumerate(answers):
        assert answer.error is None, reason_of(answer.error)
        assert answer.finished is not None
        assert answer.text == text_of(f"story {number}".encode(), NUM_TOKENS)
        assert bytes(answer.token_ids).decode() == answer.text
        assert answer.finished.usage == types_pb2.Usage(prompt_tokens=7, completion_tokens=NUM_TOKENS)
        logprobs = [it.sampled.token_id for delta in answer.deltas for it in delta.logprobs]
        assert logprobs == answer.token_ids
    assert sorted(submit.attempt for submit in fleet.second.submitted) == [2, 2, 2]
    assert all(len(submit.output_token_ids) > 5 for submit in fleet.second.submitted)


async def test_a_stop_string_across_the_cut_still_ends_the_answer(
    rig: Rig, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """The first worker says the beginning of the stop string and falls silent; the second one says the rest."""
    said = "the first half and THE-"
    first = await rig.worker(worker_id="first", step_s=None, script=_say(said + "END of it"))
    second = await rig.worker(worker_id="second", script=_say(said + "END of it"))
    app, client = await rig.serving(first)
    asked = asyncio.create_task(
        read(client.generate(generate_request(sampling={"stop": ["THE-END"], "max_tokens": 60})))
    )
    await first.wait_for(lambda: len(first.running) == 1)
    for _ in said:
        await first.step()
    await announce(app, second)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
    await eventually(lambda: [len(live.output_token_ids) for live in app.dispatcher.live] == [len(said)])
    await first.kill()
    answer = await asked
    assert answer.finished is not None
    assert (answer.text, answer.finished.reason) == ("the first half and ", types_pb2.FINISH_REASON_STOP)
    assert answer.finished.usage.completion_tokens == len(said + "END")
    assert bytes(second.submitted[0].output_token_ids).decode() == said


def _say(text: str) -> Callable[[Any, int], int]:
    return lambda submit, position: text.encode()[position % len(text)]


async def test_a_worker_that_loses_everything_ends_the_request_with_a_reason(
    rig: Rig, stack: AsyncExitStack, tmp_path: Path
) -> None:
    fleet = await pair(rig, stack, tmp_path, {"max_attempts": 1})
    [asked] = await fleet.run_until_streaming(generate_request(sampling={"max_tokens": NUM_TOKENS}))
    fleet.first.send(signal.SIGKILL)
    answer = await asked
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    assert text_of(b"hello", NUM_TOKENS).startswith(answer.text)


async def test_a_black_hole_that_ends_is_used_again(rig: Rig, stack: AsyncExitStack, tmp_path: Path) -> None:
    """Its old connections stay swallowed for ever, as those of a firewall that has forgotten them do."""
    fleet = await pair(rig, stack, tmp_path, {"worker_silence_s": 2.0, "connect_timeout_s": 2.0})
    fleet.wire.become_black_hole()
    await eventually(lambda: fleet.app.fleet.num_ready(MODEL) == 0)
    fleet.wire.heal()
    await eventually(lambda: fleet.app.fleet.num_ready(MODEL) == 1)
    assert (await fleet.client.ask()).error is None


@pytest.mark.parametrize("end", ["goodbye", "cut"])
async def test_what_a_drain_hands_back_goes_on_elsewhere_and_is_no_loss(rig: Rig, end: str) -> None:
    first = await rig.worker(worker_id="first", step_s=0.02)
    app, client = await rig.serving(first, max_attempts=1)
    asked = asyncio.create_task(client.ask("long", sampling={"max_tokens": 1000}))
    await first.wait_for(lambda: len(first.running) == 1 and first.running[0].num_emitted > 5)
    second = await rig.worker(worker_id="second")
    await announce(app, second)
    first.is_draining = True
    await announce(app, first, draining=True)
    await eventually(
        lambda: app.fleet.num_ready(MODEL) == 1 and second.worker_id in {s.worker_id for s in app.fleet.sessions}
    )
    assert first.running, "a drain lets what runs go on"
    if end == "goodbye":
        first.say_goodbye()
    else:
        await first.kill()
    answer = await asked
    assert answer.error is None
    assert answer.text == text_of(b"long", 1000)
    assert second.submitted[0].attempt == 2


async def test_a_rolling_restart_of_all_workers_loses_nothing(rig: Rig) -> None:
    """No request may lose a worker here, and every worker is restarted three times in turn under load."""
    random = Random(5)
    workers = [await rig.worker(worker_id=f"w{n}", step_s=0.004, max_num_seqs=20) for n in range(3)]
    app, client = await rig.serving(*workers, max_attempts=1)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 3)
    asked = []

    async def load() -> None:
        for number in itertools.count():
            asked.append(asyncio.create_task(client.ask(f"prompt {number}", sampling={"max_tokens": 80}, timeout=240)))
            await asyncio.sleep(random.uniform(0, 0.03))
            # A slow machine does not get more than it can do.
            while sum(not task.done() for task in asked) > 40:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    loading = asyncio.create_task(load())
    for worker in workers * 3:
        worker.is_draining = True
        await announce(app, worker, draining=True)
        await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
        worker.say_goodbye()
        port = worker.port
        await worker.kill()
        worker.epoch, worker.port, worker.is_draining = worker.epoch + 1, port, False
        await worker.start()
        await eventually(lambda: app.fleet.num_ready(MODEL) == 3)
    loading.cancel()
    answers = await asyncio.gather(*asked)
    assert len(answers) > 50
    for number, answer in enumerate(answers):
        assert answer.error is None, reason_of(answer.error)
        assert answer.text == text_of(f"prompt {number}".encode(), 80)
    assert sum(submit.attempt > 1 for worker in workers for submit in worker.submitted) > 5, "something was handed back"


async def test_what_a_worker_hands_back_goes_on_elsewhere_as_one_answer(rig: Rig) -> None:
    first = await rig.worker(worker_id="first", max_num_seqs=1, step_s=0.01)
    second = await rig.worker(worker_id="second", max_num_seqs=1, step_s=None)
    app, client = await rig.serving(first, second, max_attempts=1)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
    asked = [asyncio.create_task(client.ask("long", sampling={"max_tokens": 600})) for _ in range(2)]
    await first.wait_for(lambda: len(first.running) == 1 and first.running[0].num_emitted > 5)
    await second.wait_for(lambda: len(second.running) == 1)
    assert first.running[0].submit.may_hand_back
    fresh = [asyncio.create_task(client.ask("fresh", sampling={"max_tokens": 3})) for _ in range(3)]
    await eventually(lambda: len(app.dispatcher.live) == 5)
    first.hand_back(first.running[0])
    assert [(await it).text for it in fresh] == [text_of(b"fresh", 3)] * 3, "fresh work goes first"
    await first.wait_for(lambda: first.submitted[-1].attempt == 2)  # before the other one has a place, too
    first.tokens_per_step = 50
    for _ in range(600):
        await second.step()
    for answer in [await it for it in asked]:
        assert answer.error is None
        assert answer.text == text_of(b"long", 600)
        assert answer.finished is not None
        assert answer.finished.usage == types_pb2.Usage(prompt_tokens=4, completion_tokens=600)
    [again] = [submit for submit in first.submitted + second.submitted if submit.attempt == 2]
    assert len(again.output_token_ids) > 5
    async with asyncio.timeout(60):
        await app.dispatcher.wait_idle()
