"""Workers that come and go at random, clients that leave at random: every stream ends right, and nothing is left."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
import redis

from gateway.store.keys import PoolKeys
from tests.integration.gateway.rig import Answer, Client, Rig, eventually, generate_request, read, reason_of
from tests.support.scripted_worker import ScriptedWorker, text_of

NUM_TOKENS = 60


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_stream_ends_right_whatever_happens(
    rig: Rig, seed: int, redis_client: redis.Redis, pool: str
) -> None:
    random = Random(seed)
    workers = [
        await rig.worker(worker_id=f"w{number}", max_num_seqs=6, num_blocks=200, step_s=0.004) for number in range(3)
    ]
    served = [await rig.serving(*workers, worker_silence_s=0.6, max_attempts=20) for _ in range(2)]
    harming = asyncio.create_task(_harm(workers, random))
    try:
        waits = [random.uniform(0, 4) for _ in range(120)]
        asked = [_ask(served[n % 2][1], f"prompt {n}", wait_s, random) for n, wait_s in enumerate(waits)]
        answers = await asyncio.gather(*asked)
    finally:
        harming.cancel()
        await asyncio.gather(harming, return_exceptions=True)
    ended = [(number, answer) for number, answer in enumerate(answers) if answer is not None]
    assert len(ended) > 60
    for number, answer in ended:
        assert answer.error is None, reason_of(answer.error)
        assert answer.text == text_of(f"prompt {number}".encode(), NUM_TOKENS)
        assert answer.finished is not None
        assert answer.finished.usage.completion_tokens == NUM_TOKENS
    apps = [app for app, _ in served]
    await eventually(lambda: all(app.dispatcher.live == () for app in apps))
    for worker in workers:
        await worker.wait_for(lambda worker=worker: not worker.running)  # type: ignore[misc]
    assert [depth.num_waiting for depth in await apps[0].queue.depths()] == [0, 0, 0]
    entries = {fields["request_id"]: fields for _, fields in redis_client.xrange(PoolKeys(pool).ledger)}
    assert len(entries) == redis_client.xlen(PoolKeys(pool).ledger), "each request is in the books once"
    for _, answer in ended:
        assert answer.accepted is not None
        entry = entries[f"acme/{answer.accepted.request_id}"]
        assert (entry["outcome"], entry["generated_tokens"]) == ("completed", str(NUM_TOKENS))


async def _ask(client: Client, prompt: str, wait_s: float, random: Random) -> Answer | None:
    """The whole answer, or None for a client that left."""
    await asyncio.sleep(wait_s)
    call = client.generate(generate_request(prompt, sampling={"max_tokens": NUM_TOKENS}), timeout=240)
    if random.random() < 0.3:
        await asyncio.sleep(random.uniform(0, 0.3))
        call.cancel()
        return None
    return await read(call)


async def _harm(workers: list[ScriptedWorker], random: Random) -> None:
    """Kills and silences workers in turn, and brings each back under its address with a new epoch."""
    while True:
        await asyncio.sleep(random.uniform(0.1, 0.5))
        worker = random.choice(workers)
        if random.random() < 0.3:
            worker.is_silent = True
            await asyncio.sleep(0.8)
        port = worker.port
        await worker.kill()
        await asyncio.sleep(random.uniform(0, 0.3))
        worker.epoch, worker.port, worker.is_silent = worker.epoch + 1, port, False
        await worker.start()
