"""Several gateways and workers on one Redis: sharing, losing, leaving, announcing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from common.types import Band, ModelDescription, SamplingParams
from gateway.app import GatewayApp
from gateway.placement.worker import Submission
from gateway.rpc import dialer
from gateway.text import TextModel
from protos.inference.v1 import types_pb2
from tests.integration.gateway.rig import FLEET_KEY, Rig, announce, eventually, has_got, reason_of
from tests.support.scripted_worker import MODEL, ScriptedWorker, text_of


async def all_ready(*apps: GatewayApp, num_workers: int) -> None:
    await eventually(lambda: all(app.fleet.num_ready(MODEL) == num_workers for app in apps))


async def idle(*apps: GatewayApp) -> None:
    async with asyncio.timeout(60):
        for app in apps:
            await app.dispatcher.wait_idle()


async def test_two_gateways_and_two_workers_share_one_queue(rig: Rig) -> None:
    workers = [await rig.worker(worker_id=f"w{n}", max_num_seqs=3, num_blocks=64) for n in range(2)]
    served = [await rig.serving(*workers) for _ in range(2)]
    apps, clients = zip(*served, strict=True)
    await all_ready(*apps, num_workers=2)
    over_admitted: list[int] = []

    async def watch(worker: ScriptedWorker) -> None:
        while True:
            await worker.wait_for(lambda: len(worker.running) > 3)
            over_admitted.append(len(worker.running))

    watchers = [asyncio.create_task(watch(worker)) for worker in workers]
    prompts = [f"prompt {number}" for number in range(60)]
    asked = [clients[n % 2].ask(prompt, sampling={"max_tokens": 20}) for n, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*asked)
    for watcher in watchers:
        watcher.cancel()
    assert [answer.error for answer in answers] == [None] * 60
    assert [answer.text for answer in answers] == [text_of(prompt.encode(), 20) for prompt in prompts]
    assert all(len(worker.submitted) >= 15 for worker in workers)
    assert over_admitted == []
    await idle(*apps)
    assert [depth.num_waiting for depth in await apps[0].queue.depths()] == [0, 0, 0]


async def test_commands_that_come_together_go_to_a_worker_in_few_messages(rig: Rig) -> None:
    worker = await rig.worker()
    app, _ = await rig.serving(worker)
    [session], [theirs] = app.fleet.sessions, worker.sessions
    names, num_before = [f"acme/{number}" for number in range(40)], theirs.num_messages
    for name in names:
        session.submit(
            Submission(name, 1, (200,) * 4000, (), SamplingParams(seed=1, max_tokens=1), Band.HIGH, ""), is_alone=False
        )
    await eventually(lambda: len(worker.submitted) == len(names))
    assert [submit.request_id.partition("#")[0] for submit in worker.submitted] == names
    assert 1 < theirs.num_messages - num_before < 10, "some 320 KB of prompts: not one by one, and not all at once"


async def test_a_lost_worker_is_a_pause(rig: Rig) -> None:
    await survives(rig, ScriptedWorker.kill)


async def test_a_silent_worker_is_lost(rig: Rig) -> None:
    async def silence(worker: ScriptedWorker) -> None:
        worker.is_silent = True

    await survives(rig, silence)


async def test_a_worker_whose_loop_hangs_is_lost(rig: Rig) -> None:
    async def hang(worker: ScriptedWorker) -> None:
        worker.loop_age_s = 1000.0

    await survives(rig, hang)


async def survives(rig: Rig, harm: Callable[[ScriptedWorker], Any]) -> None:
    """A stream goes on with the same text, usage and seed on another worker when its own is harmed."""
    first = await rig.worker(worker_id="first", step_s=0.01)
    app, client = await rig.serving(first, worker_silence_s=2.0)
    answers = [
        asyncio.create_task(
            client.ask(f"story {n}", sampling={"max_tokens": 1000, "logprobs": 0}, return_token_ids=True)
        )
        for n in range(3)
    ]
    await has_got(app, 5, num_requests=3)
    second = await rig.worker(worker_id="second")
    await announce(app, second)
    await all_ready(app, num_workers=2)
    await harm(first)
    for number, answer in enumerate([await answer for answer in answers]):
        assert answer.error is None
        assert answer.finished is not None
        assert answer.text == text_of(f"story {number}".encode(), 1000)
        assert answer.finished.usage == types_pb2.Usage(prompt_tokens=7, completion_tokens=1000)
        assert len(answer.token_ids) == 1000
        assert sum(len(delta.logprobs) for delta in answer.deltas) == 1000
    resumed = second.submitted
    assert len(resumed) == 3
    assert all(submit.attempt == 2 and len(submit.output_token_ids) >= 5 for submit in resumed)
    originals = {bytes(submit.prompt_token_ids): submit.sampling.seed for submit in first.submitted}
    assert all(originals[bytes(submit.prompt_token_ids)] == submit.sampling.seed for submit in resumed)
    await idle(app)


async def test_attempts_are_bounded(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    answer = asyncio.create_task(client.ask())
    for attempt in range(1, 4):
        await worker.wait_for(lambda attempt=attempt: len(worker.submitted) == attempt and bool(worker.running))  # type: ignore[misc]
        port = worker.port
        await worker.kill()
        await eventually(lambda: not app.fleet.is_ready)
        if attempt < 3:
            worker.epoch += 1
            worker.port = port
            await worker.start()
    ended = await answer
    assert ended.error is not None
    assert (ended.error.code(), reason_of(ended.error)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    assert [submit.attempt for submit in worker.submitted] == [1, 2, 3]
    await idle(app)


async def test_a_worker_that_comes_back_is_used_again(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    assert (await client.ask("one")).error is None
    port = worker.port
    await worker.kill()
    await eventually(lambda: not app.fleet.is_ready)
    worker.epoch, worker.port = 2, port
    await worker.start()
    await client.wait_serving()
    answer = await client.ask("two")
    assert answer.text == text_of(b"two", 8)


async def test_a_worker_without_room_is_asked_again(rig: Rig) -> None:
    worker = await rig.worker(reject=types_pb2.REASON_NO_CREDIT)
    app, client = await rig.serving(worker)
    answer = asyncio.create_task(client.ask())
    await worker.wait_for(lambda: len(worker.submitted) >= 3)
    worker.reject = None
    assert (await answer).error is None
    attempts = [submit.attempt for submit in worker.submitted]
    assert attempts == list(range(1, len(attempts) + 1))
    await idle(app)


async def test_a_draining_worker_hands_on_what_it_has_not_begun(rig: Rig) -> None:
    first = await rig.worker(worker_id="first")
    app, client = await rig.serving(first)
    first.is_draining = True
    answer = asyncio.create_task(client.ask())
    second = await rig.worker(worker_id="second")
    await announce(app, second)
    assert (await answer).error is None
    assert len(second.submitted) == 1
    first.say_goodbye()
    await eventually(lambda: len(app.fleet.sessions) == 1)
    assert (await client.ask()).error is None
    await idle(app)


async def test_announced_workers_are_dialled_by_every_gateway(rig: Rig) -> None:
    worker = await rig.worker(fleet_key=FLEET_KEY)
    first, second = await rig.gateway(), await rig.gateway()
    ttl_s = await announce(first, worker)
    assert ttl_s == pytest.approx(10.0)
    await all_ready(first, second, num_workers=1)
    assert (await (await rig.client(second)).ask()).error is None


async def test_workers_of_a_model_that_are_met_together_share_its_text_side(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TextModel] = []

    def make(description: ModelDescription) -> TextModel:
        made.append(TextModel(description))
        return made[-1]

    monkeypatch.setattr(dialer, "TextModel", make)
    workers = [await rig.worker(worker_id=f"w{number}", max_num_seqs=3 + number) for number in range(4)]
    app, client = await rig.serving(*workers)
    await all_ready(app, num_workers=4)
    assert len(made) == 1
    assert {session.limits.max_num_seqs for session in app.fleet.sessions} == {3, 4, 5, 6}
    assert (await client.ask()).error is None


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_announcements_need_the_fleet_key(rig: Rig, key: str | None) -> None:
    worker = await rig.worker()
    for fleet_key in (FLEET_KEY, ""):
        app = await rig.gateway(fleet_key=fleet_key)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await announce(app, worker, key=key)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "a b"}, "worker_id"),
        ({"address": "nowhere"}, "address"),
        ({"model": ""}, "model"),
    ],
)
async def test_announcements_are_checked(rig: Rig, changes: dict[str, str], field: str) -> None:
    app = await rig.gateway()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await announce(app, await rig.worker(), **changes)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")


async def test_a_gateway_that_dies_leaves_no_request_behind(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    doomed, client = await rig.serving(worker, heartbeat_ttl_s=0.5)
    call = client.generate()
    await anext(aiter(call))
    await worker.wait_for(lambda: len(worker.running) == 1)
    # What a SIGKILL does, as far as the store can see: no finish, no heartbeat.
    await doomed._background.close()
    other, client = await rig.serving(worker)
    answer = asyncio.create_task(client.ask("next", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: any(bytes(it.submit.prompt_token_ids) == b"next" for it in worker.running))
    await worker.step()
    assert (await answer).error is None
    await idle(other)
    call.cancel()
    await doomed.queue.heartbeat(ttl_s=1.0)
