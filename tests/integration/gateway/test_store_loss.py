"""A Redis that dies, comes back empty, or hangs: what was accepted is served, what is new is refused at once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from common.local_redis import LocalRedis
from tests.integration.gateway.rig import (
    Answer,
    Client,
    Rig,
    eventually,
    generate_request,
    read,
    reason_of,
    until_health,
)
from tests.support.scripted_worker import text_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def accepted(client: Client, text: str, max_tokens: int) -> asyncio.Task[Answer]:
    """A stream whose request is in the queue."""
    call = client.generate(generate_request(text, sampling={"max_tokens": max_tokens}), timeout=60)
    assert (await anext(aiter(call))).HasField("accepted")
    return asyncio.create_task(read(call))


async def test_a_redis_that_comes_back_empty_loses_no_accepted_request(rig: Rig, tmp_path: Path) -> None:
    worker = await rig.worker(max_num_seqs=2, step_s=None)
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        app, client = await rig.serving(worker, redis_url=redis.url)
        texts = [f"prompt {number}" for number in range(8)]
        streams = [await accepted(client, text, 12) for text in texts]
        await worker.wait_for(lambda: len(worker.running) == 2)
        await worker.step()
        redis.stop()
        await until_health(client, "", NOT_SERVING)
        await worker.step()
        redis.start()
        await until_health(client, "", SERVING)
        while not all(stream.done() for stream in streams):
            await worker.step()
            await asyncio.sleep(0.01)
        answers = [await stream for stream in streams]
        assert [answer.error for answer in answers] == [None] * 8
        assert [answer.text for answer in answers] == [text_of(text.encode(), 12) for text in texts]
        assert [answer.finished.usage.completion_tokens for answer in answers if answer.finished] == [12] * 8
        await app.dispatcher.wait_idle()
    finally:
        redis.stop()


async def test_while_it_hangs_new_requests_are_refused_and_running_ones_go_on(rig: Rig, tmp_path: Path) -> None:
    worker = await rig.worker(step_s=None)
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        app, client = await rig.serving(worker, redis_url=redis.url, store_timeout_s=0.5)
        running = await accepted(client, "hello", 4)
        await worker.wait_for(lambda: len(worker.running) == 1)
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            await until_health(client, "", NOT_SERVING)
            refused = await client.ask("late")
            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(refused.error) == "STORE_UNAVAILABLE"
            assert "nothing new is accepted" in str(refused.error.details()), "nobody asked the store"
            for _ in range(4):
                await worker.step()
            answer = await running
            assert answer.error is None
            assert answer.text == text_of(b"hello", 4)
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        await until_health(client, "", SERVING)
        later = await accepted(client, "again", 1)
        await worker.wait_for(lambda: len(worker.running) == 1)
        await worker.step()
        assert (await later).error is None
        await eventually(lambda: not app.dispatcher.live)
    finally:
        redis.stop()
