"""A Redis that dies, comes back empty, or hangs: what was accepted is served, what is new lives on shares."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import redis as redis_library
import structlog
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2

from common.local_redis import LocalRedis
from common.types import Band
from gateway.admission.limits import TenantLimits
from gateway.app import GatewayApp
from gateway.store.keys import PoolKeys
from gateway.tenants import Tenant
from protos.inference.v1 import jobs_pb2
from tests.integration.gateway.rig import (
    KEYS,
    Answer,
    Client,
    Rig,
    detail_of,
    eventually,
    find_detail,
    generate_request,
    read,
    reason_of,
    until_health,
)
from tests.support.redis import held_keys
from tests.support.scripted_worker import text_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def stopped(redis: LocalRedis) -> Iterator[None]:
    """A server that does not answer."""
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(redis.pid, signal.SIGCONT)


@contextmanager
def patience(app: GatewayApp, patience_s: float) -> Iterator[None]:
    """So much of it meanwhile: before and after, a busy machine's store may take its time."""
    with pytest.MonkeyPatch.context() as patch:
        handler, calls = app._handler, app._resumption._calls
        patch.setattr(handler, "_settings", replace(handler._settings, store_patience_s=patience_s))
        patch.setattr(calls, "_patience_s", patience_s)
        yield


async def accepted(client: Client, text: str, max_tokens: int) -> asyncio.Task[Answer]:
    """A stream whose request is in the queue."""
    call = client.generate(generate_request(text, sampling={"max_tokens": max_tokens}), timeout=240)
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


async def test_while_it_hangs_running_requests_go_on_and_new_ones_wait(rig: Rig, tmp_path: Path) -> None:
    worker = await rig.worker(step_s=None)
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        app, client = await rig.serving(worker, redis_url=redis.url, store_timeout_s=0.5)
        running = await accepted(client, "hello", 4)
        await worker.wait_for(lambda: len(worker.running) == 1)
        with stopped(redis), structlog.testing.capture_logs() as logs:
            await until_health(client, "", NOT_SERVING)
            waiting = await accepted(client, "later", 1)
            for _ in range(4):
                await worker.step()
            answer = await running
            assert answer.error is None
            assert answer.text == text_of(b"hello", 4)
            resumable = await client.ask("late", resumable=True)
            assert reason_of(resumable.error) == "STORE_UNAVAILABLE", "it cannot be written down"
            assert [log["event"] for log in logs if log["event"].startswith("store_")] == ["store_down"]
        await until_health(client, "", SERVING)
        await worker.wait_for(lambda: len(worker.running) == 1)
        await worker.step()
        assert (await waiting).error is None
        await eventually(lambda: not app.dispatcher.live)
    finally:
        redis.stop()


async def test_the_first_to_meet_a_hanging_store_are_decided_before_it_counts_as_lost(rig: Rig, tmp_path: Path) -> None:
    """No call fails in this test: the store's silence alone decides."""
    worker = await rig.worker()
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        tenants = {
            "key-acme": KEYS["key-acme"],
            "key-tiny": Tenant("tiny", Band.HIGH, 1, TenantLimits(max_concurrent=1)),
        }
        app, client = await rig.serving(worker, redis_url=redis.url, tenants_by_key=tenants, store_timeout_s=600.0)
        tiny = await rig.client(app, "key-tiny")
        request = generate_request("long", idempotency_key="l", sampling={"max_tokens": 3000})
        whole = asyncio.create_task(read(client.generate(request, timeout=240)))
        await worker.wait_for(lambda: len(worker.running) == 1)
        with stopped(redis), patience(app, 0.04):
            refused = await tiny.ask("no share of one can be had")
            waiting = await accepted(client, "hello", 2)
            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(refused.error) == "STORE_UNAVAILABLE"
            assert detail_of(refused.error, error_details_pb2.RetryInfo).retry_delay.seconds >= 1
            for fields in (
                {"resumable": True, "request_id": "mine"},
                {"idempotency_key": "k"},
                {"idempotency_key": "l"},
            ):
                refused = await client.ask("long", sampling={"max_tokens": 3000}, **fields)
                assert reason_of(refused.error) == "STORE_UNAVAILABLE"
            for job_id in ("", "named"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.job("Submit", request=generate_request(request_id=job_id))
                assert reason_of(caught.value) == "STORE_UNAVAILABLE"
        await eventually(lambda: app._background.num_steps == 0)
        await app._resumption.flush(checks_all=True)  # a run that was taken over notices it now
        worker.tokens_per_step = 100
        answer = await whole
        assert answer.error is None
        assert answer.text == text_of(b"long", 3000), "who was refused has not taken it over"
        answer = await waiting
        assert answer.text == text_of(b"hello", 2)
        await eventually(lambda: not app.dispatcher.live)
        assert (await tiny.ask()).error is None, "what was refused has given its slot back"
        await eventually(lambda: app._background.num_steps == 0)
        again = await client.ask("long", sampling={"max_tokens": 3000}, resumable=True, request_id="mine")
        assert again.error is None, "what was refused has given its id back"
        jobs = await client.jobs.List(jobs_pb2.ListJobsRequest(), metadata=client.metadata, timeout=30)
        states = {job.job_id: job.state for job in jobs.jobs}
        assert jobs_pb2.JOB_STATE_CANCELLED not in (states.pop("named"),), "asked again, it is the same one"
        assert list(states.values()) == [jobs_pb2.JOB_STATE_CANCELLED], "nobody knows its name"
    finally:
        redis.stop()


async def test_waiting_for_the_store_has_an_end(rig: Rig, tmp_path: Path) -> None:
    worker = await rig.worker()
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        _, client = await rig.serving(worker, redis_url=redis.url, store_timeout_s=0.3, store_wait_s=0.5)
        with stopped(redis):
            await until_health(client, "", NOT_SERVING)
            answer = await client.ask()
            assert answer.accepted is not None
            assert reason_of(answer.error) == "STORE_UNAVAILABLE"
        await until_health(client, "", SERVING)
        with redis_library.Redis.from_url(redis.url, decode_responses=True) as store:
            await eventually(lambda: len(store.keys("*:ledger")) == 1)
            (ledger,) = store.keys("*:ledger")
            ((_, record),) = store.xrange(ledger)
        assert record["request_id"] == f"acme/{answer.accepted.request_id}", "what was accepted is in the books"
        assert (record["outcome"], record["reason"]) == ("failed", "STORE_UNAVAILABLE")
    finally:
        redis.stop()


async def test_scripts_that_are_forgotten_again_and_again_cost_nothing(
    rig: Rig, redis_client: redis_library.Redis, pool: str
) -> None:
    """A call that has to be sent in full comes behind later ones: no order that matters depends on that."""
    worker = await rig.worker(max_num_seqs=8)
    limits = TenantLimits(max_concurrent=200, tokens_per_day=10_000)
    tenants = KEYS | {"key-acme": Tenant("acme", Band.NORMAL, limits=limits)}
    app, client = await rig.serving(worker, tenants_by_key=tenants)

    async def forget() -> None:
        while True:
            redis_client.script_flush()
            await asyncio.sleep(0.002)

    forgetting = asyncio.create_task(forget())
    answers = await asyncio.gather(*(client.ask(f"prompt {n}", resumable=n % 3 == 0, timeout=240) for n in range(60)))
    forgetting.cancel()
    assert [answer.error for answer in answers] == [None] * 60
    assert [answer.text for answer in answers] == [text_of(f"prompt {n}".encode(), 8) for n in range(60)]
    await eventually(lambda: not app.dispatcher.live and held_keys(redis_client, pool) == [])
    num_used = sum(it.finished.usage.prompt_tokens + 8 for it in answers if it.finished is not None)
    [left] = await app.limiter.remaining({"acme": limits})
    assert left.tokens_today == 10_000 - num_used
    assert redis_client.xlen(PoolKeys(pool).ledger) == 60


async def test_a_request_that_is_enqueued_late_is_dispatched_all_the_same(rig: Rig) -> None:
    """What an earlier request of its id may have left is removed first, and meanwhile its dispatch has run. Nothing
    else would dispatch it: its worker is idle, and has nothing to say."""
    app, client = await rig.serving(await rig.worker(alive_s=18.0))
    app.queue._doubtful.add("acme/mine")  # type: ignore[attr-defined]
    assert (await client.ask(request_id="mine", timeout=15)).error is None


COST = 5 + 5  # "hello" and the answer
BUDGET = 40 * COST
SAMPLING = {"max_tokens": 5, "ignore_eos": True}


@pytest.mark.parametrize("loss", ["hangs", "dies"])
async def test_gateways_live_on_their_shares_and_the_fleets_total_holds(rig: Rig, tmp_path: Path, loss: str) -> None:
    worker = await rig.worker(max_num_seqs=16)
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        tenants = {"key-acme": Tenant("acme", Band.NORMAL, 1, TenantLimits(tokens_per_day=BUDGET))}
        settings = {"tenants_by_key": tenants, "redis_url": redis.url, "outage_share": 0.5, "store_timeout_s": 0.5}
        apps, clients = zip(*[await rig.serving(worker, **settings) for _ in range(2)], strict=True)

        def ask(num_requests: int) -> list[asyncio.Task[Answer]]:
            return [
                asyncio.create_task(client.ask(sampling=SAMPLING, timeout=240))
                for _ in range(num_requests)
                for client in clients
            ]

        answers = await asyncio.gather(*ask(2))
        for app in apps:
            await eventually(lambda app=app: app.limiter.held("acme").tokens_today > 0)  # type: ignore[misc]
        if loss == "hangs":
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
        else:
            redis.stop()
        for client in clients:
            await until_health(client, "", NOT_SERVING)
        asking = ask(40)
        refused = 80 - sum(app.limiter.held("acme").tokens_today // COST for app in apps)
        await eventually(lambda: sum(task.done() for task in asking) >= refused)
        if loss == "hangs":
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGCONT)
        else:
            redis.start()
        answers += await asyncio.gather(*asking)
        by_reason = Counter(reason_of(answer.error) for answer in answers if answer.error is not None)
        assert by_reason == {"STORE_UNAVAILABLE": refused}
        for client in clients:
            await until_health(client, "", SERVING)
        # Until one is told that it is of no use to come back.
        while answers[-1].error is None or find_detail(answers[-1].error, error_details_pb2.RetryInfo) is not None:
            answers += await asyncio.gather(*ask(1))
        served = sum(answer.finished is not None for answer in answers)
        assert served == 40, "neither more than the limit, nor less"
        await eventually(lambda: not any(app.dispatcher.live for app in apps))
    finally:
        redis.stop()
