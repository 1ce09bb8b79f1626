"""Clients that leave or cancel at any moment around the dispatch of their request: nothing is ever left behind.

Every token that is not read at once pauses its request, and workers hand requests back whenever they like.

`TIDEGATE_TEST_CANCELS` sets how many; a thorough run has 10,000.
"""

from __future__ import annotations

import asyncio
import os
from random import Random

import grpc
import pytest
import redis

from tests.integration.gateway.rig import Client, Rig, eventually, generate_request, reason_of
from tests.support.redis import request_keys
from tests.support.scripted_worker import ScriptedWorker

NUM_CANCELS = int(os.environ.get("TIDEGATE_TEST_CANCELS", "400"))
AT_ONCE = 24


@pytest.mark.timeout(300 + NUM_CANCELS // 10)
async def test_nothing_is_left_of_requests_that_are_given_up_around_their_dispatch(
    rig: Rig, redis_client: redis.Redis, pool: str
) -> None:
    random = Random(17)
    workers = [await rig.worker(worker_id=f"w{n}", max_num_seqs=4, step_s=0.005) for n in range(2)]
    served = [await rig.serving(*workers, max_unread_tokens=1) for _ in range(2)]
    numbers = iter(range(NUM_CANCELS))
    ends: list[str] = []

    async def give_up_again_and_again() -> None:
        for number in numbers:
            ends.append(await _give_up(served[number % 2][1], served[random.randrange(2)][1], f"r{number}", random))

    handing_back = asyncio.create_task(_hand_back_now_and_then(workers, random))
    await asyncio.gather(*(give_up_again_and_again() for _ in range(AT_ONCE)))
    handing_back.cancel()
    assert len(ends) == NUM_CANCELS
    assert {"left", "cancelled"} <= set(ends) <= {"left", "cancelled", "finished", "refused"}
    assert ends.count("refused") < NUM_CANCELS / 2  # by a store that a busy machine has made slow
    apps = [app for app, _ in served]
    assert any(worker.pauses for worker in workers)
    causes = [
        app._registry.get_sample_value("tidegate_gateway_requeued_total", {"cause": "handed_back"}) for app in apps
    ]
    assert sum(filter(None, causes)) > NUM_CANCELS / 100
    await eventually(lambda: all(app.dispatcher.live == () for app in apps))
    for worker in workers:
        await worker.wait_for(lambda worker=worker: _is_idle(worker))  # type: ignore[misc]
    await eventually(lambda: request_keys(redis_client, pool) == [])
    assert [depth.num_waiting for depth in await apps[0].queue.depths()] == [0, 0, 0]
    assert (await served[0][1].ask("after all that")).error is None


async def _hand_back_now_and_then(workers: list[ScriptedWorker], random: Random) -> None:
    while True:
        await asyncio.sleep(0.02)
        running = [(worker, it) for worker in workers for it in worker.running if it.submit.may_hand_back]
        if running:
            worker, chosen = random.choice(running)
            worker.hand_back(chosen)


def _is_idle(worker: ScriptedWorker) -> bool:
    return not worker.running


async def _give_up(client: Client, other: Client, request_id: str, random: Random) -> str:
    """Starts a request and gives it up within some milliseconds of its likely dispatch; says how it ended."""
    call = client.generate(generate_request(request_id=request_id, sampling={"max_tokens": 30}), timeout=60)
    reading = asyncio.create_task(_last(call))
    await asyncio.sleep(random.uniform(0, 0.05))
    if random.random() < 0.5:
        call.cancel()
    else:
        try:
            await other.cancel(request_id)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        await asyncio.wait([reading], timeout=random.choice((0.0, 0.02, 0.1, 30.0)))
        call.cancel()
    return await reading


async def _last(call: grpc.aio.UnaryStreamCall) -> str:  # type: ignore[type-arg]
    last = "left"
    try:
        async for response in call:
            if response.HasField("finished"):
                last = "cancelled" if response.finished.reason == 3 else "finished"
    except asyncio.CancelledError:
        return "left"
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and reason_of(error) == "STORE_UNAVAILABLE":
            return "refused"
        if error.code() is not grpc.StatusCode.CANCELLED:
            raise
        return "left"
    return last
