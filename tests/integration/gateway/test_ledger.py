"""One record of what every accepted request used, whatever became of it, of its worker and of its gateway."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest
import redis

from common.clock import SystemClock
from common.errors import UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost
from gateway.admission.limits import TenantLimits
from gateway.app import GatewayApp
from gateway.ledger import UsageRecord
from gateway.store.keys import PoolKeys
from gateway.store.redis_ledger import RedisLedger
from gateway.store.redis_limiter import RedisLimiter
from tests.integration.gateway.rig import Answer, Client, Rig, announce, eventually, generate_request, read, take
from tests.support.scripted_worker import MODEL, ScriptedWorker

Record = dict[str, str]


def records(client: redis.Redis, pool: str) -> list[Record]:
    """All closed records, oldest first."""
    return [fields for _, fields in client.xrange(PoolKeys(pool).ledger)]


async def closed(client: redis.Redis, pool: str, count: int) -> list[Record]:
    """All closed records, once there are so many."""
    await eventually(lambda: client.xlen(PoolKeys(pool).ledger) >= count)
    return records(client, pool)


def total(entries: list[Record], name: str) -> int:
    return sum(int(entry[name]) for entry in entries)


async def test_a_request_is_recorded_with_its_usage_and_times(rig: Rig, redis_client: redis.Redis, pool: str) -> None:
    _, client = await rig.serving(await rig.worker())
    answer = await client.ask("hello", request_id="mine", sampling={"max_tokens": 12})
    assert answer.error is None
    [record] = await closed(redis_client, pool, 1)
    numbers = {name: value for name, value in record.items() if name.endswith("_tokens")}
    assert numbers == {
        "prompt_tokens": "5",
        "cached_prompt_tokens": "0",
        "generated_tokens": "12",
        "delivered_tokens": "12",
        "recomputed_tokens": "0",
    }
    assert (record["request_id"], record["tenant"], record["band"]) == ("acme/mine", "acme", "normal")
    assert (record["model"], record["outcome"], record["reason"]) == (MODEL, "completed", "LENGTH")
    assert record["num_attempts"] == "1"
    assert 0 < float(record["ttft_s"]) <= float(record["total_s"])


async def test_what_is_refused_is_not_recorded(rig: Rig, redis_client: redis.Redis, pool: str) -> None:
    _, client = await rig.serving(await rig.worker())
    assert (await client.ask(sampling={"temperature": -1})).error is not None
    assert (await client.ask(model="nobody")).error is not None
    assert (await client.ask()).error is None
    assert [record["outcome"] for record in await closed(redis_client, pool, 1)] == ["completed"]


async def test_books_that_could_not_be_opened_are_opened_while_the_answer_goes_on(
    rig: Rig, redis_client: redis.Redis, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    ledger, num_tries = app._books._ledger, 0
    opening = ledger.open

    def open_at_third_try(record: UsageRecord) -> asyncio.Future[Any]:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 3:
            return opening(record)
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(UnavailableError("no answer", reason=Reason.STORE_UNAVAILABLE))
        return failed

    monkeypatch.setattr(ledger, "open", open_at_third_try)
    asked = asyncio.create_task(client.ask(request_id="mine", sampling={"max_tokens": 2}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    open_records = PoolKeys(pool).open_records(app.gateway_id)
    await eventually(lambda: redis_client.hlen(open_records) == 1)
    assert num_tries == 3
    for _ in range(2):
        await worker.step()
    assert (await asked).error is None
    [record] = await closed(redis_client, pool, 1)
    assert (record["request_id"], record["outcome"], record["generated_tokens"]) == ("acme/mine", "completed", "2")
    await eventually(lambda: redis_client.hlen(open_records) == 0)


async def test_what_a_lost_worker_had_computed_is_recorded_as_recomputed(
    rig: Rig, redis_client: redis.Redis, pool: str
) -> None:
    first = await rig.worker(worker_id="first", step_s=None)
    app, client = await rig.serving(first)
    asked = asyncio.create_task(client.ask("hello", sampling={"max_tokens": 9}))
    await first.wait_for(lambda: len(first.running) == 1)
    for _ in range(4):
        await first.step()
    await eventually(lambda: [len(live.output_token_ids) for live in app.dispatcher.live] == [4])
    second = await rig.worker(worker_id="second")
    await announce(app, second)
    await first.kill()
    assert (await asked).error is None
    [record] = await closed(redis_client, pool, 1)
    assert (record["prompt_tokens"], record["generated_tokens"], record["num_attempts"]) == ("5", "9", "2")
    assert record["recomputed_tokens"] == str(5 + 4)


async def test_the_sums_are_those_of_the_workers(rig: Rig, redis_client: redis.Redis, pool: str) -> None:
    """Clients leave and cancel at random, workers refuse and drain in turn: every token made is in the books."""
    random = Random(3)
    workers = [await rig.worker(worker_id=f"w{n}", step_s=0.004, max_num_seqs=12) for n in range(3)]
    served = [await rig.serving(*workers, max_attempts=1) for _ in range(2)]
    await eventually(lambda: all(app.fleet.num_ready(MODEL) == 3 for app, _ in served))
    disturbing = asyncio.create_task(_disturb(workers, served, random))
    waits = [random.uniform(0, 3) for _ in range(150)]
    try:
        asked = [_ask(served[n % 2][1], n, wait_s, random) for n, wait_s in enumerate(waits)]
        answers = [answer for answer in await asyncio.gather(*asked) if answer.accepted is not None]
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
    await eventually(lambda: all(app.dispatcher.live == () for app, _ in served))
    for worker in workers:
        await worker.wait_for(lambda worker=worker: not worker.running)  # type: ignore[misc]
    entries = await closed(redis_client, pool, len(answers))

    made = sum(worker.num_generated for worker in workers)
    await eventually(lambda: total(records(redis_client, pool), "generated_tokens") + late(served) == made)
    assert len(entries) == len({entry["record_id"] for entry in entries}) == len(answers)
    by_id = {entry["request_id"]: entry for entry in entries}
    for answer in answers:
        assert answer.accepted is not None
        entry = by_id[f"acme/{answer.accepted.request_id}"]
        assert int(entry["prompt_tokens"]) == answer.accepted.prompt_tokens
        assert len(answer.token_ids) <= int(entry["delivered_tokens"]) <= int(entry["generated_tokens"])
        if answer.finished is not None:
            assert len(answer.token_ids) == int(entry["delivered_tokens"])
    assert {entry["outcome"] for entry in entries} == {"completed", "cancelled"}
    assert total(entries, "recomputed_tokens") > 0


def late(served: list[tuple[GatewayApp, Client]]) -> int:
    name = "tidegate_gateway_late_tokens_total"
    return int(sum(app._registry.get_sample_value(name) or 0 for app, _ in served))


async def _ask(client: Client, number: int, wait_s: float, random: Random) -> Answer:
    """An answer that is read to its end, cancelled, or left alone after a while."""
    await asyncio.sleep(wait_s)
    request_id = f"r{number}"
    request = generate_request(
        "x" * (1 + number % 7), request_id=request_id, return_token_ids=True, sampling={"max_tokens": 60}
    )
    call = client.generate(request, timeout=240)
    end = random.choice(["read", "read", "cancel", "leave"])
    if end == "read":
        return await read(call)
    answer, left_at = Answer(), random.randrange(8)
    async for response in call:
        take(answer, response)
        if len(answer.token_ids) >= left_at:
            break
    if end == "cancel":
        await client.cancel(request_id)
        async for response in call:
            take(answer, response)
    call.cancel()
    return answer


async def _disturb(workers: list[ScriptedWorker], served: list[Any], random: Random) -> None:
    """Lets workers refuse for a while, and restarts them after a drain that hands back what still runs."""
    while True:
        worker = random.choice(workers)
        worker.reject = 22  # NO_CREDIT
        await asyncio.sleep(random.uniform(0.05, 0.2))
        worker.reject = None
        await asyncio.sleep(random.uniform(0.05, 0.2))
        worker.is_draining = True
        await asyncio.sleep(random.uniform(0, 0.1))
        worker.say_goodbye()
        await worker.wait_for(lambda worker=worker: not worker.sessions)  # type: ignore[misc]
        worker.epoch, worker.is_draining = worker.epoch + 1, False


async def test_another_gateway_closes_the_records_of_a_dead_one_once(
    rig: Rig, redis_client: redis.Redis, pool: str
) -> None:
    worker = await rig.worker(step_s=0.01)
    doomed, client = await rig.serving(worker, heartbeat_ttl_s=0.6)
    asked = asyncio.create_task(client.ask("hello", request_id="orphan", sampling={"max_tokens": 4000}))
    await eventually(lambda: len(_open_records(redis_client, pool)) == 1)
    number = UsageRecord._fields.index("generated_tokens")
    await eventually(lambda: json.loads(_open_records(redis_client, pool)[0])[number] != "0")
    await doomed._background.close()  # what a SIGKILL does, as far as the store can see
    other = await rig.gateway(worker)
    [record] = await closed(redis_client, pool, 1)
    assert (record["request_id"], record["outcome"], record["reason"]) == ("acme/orphan", "lost", "GATEWAY_LOST")
    assert (record["prompt_tokens"], int(record["generated_tokens"]) > 0) == ("5", True)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await eventually(lambda: doomed.dispatcher.live == ())  # alive after all: it closes its record too late
    assert len(records(redis_client, pool)) == 1
    assert other.dispatcher.live == ()


def _open_records(client: redis.Redis, pool: str) -> list[str]:
    keys = client.keys(PoolKeys(pool).open_records("*").replace("{", "[{]").replace("}", "[}]"))
    return [record for key in keys for record in client.hvals(key)]


def usage(record_id: str = "one", **changes: Any) -> UsageRecord:
    fields: dict[str, Any] = {
        "request_id": "acme/r1",
        "tenant": "acme",
        "band": "normal",
        "model": "m",
        "prompt_tokens": 1,
        "cached_prompt_tokens": 0,
        "generated_tokens": 2,
        "delivered_tokens": 2,
        "recomputed_tokens": 0,
        "num_attempts": 1,
        "accepted_at": 1.5,
        "queue_s": 0.1,
        "ttft_s": 0.2,
        "total_s": 0.3,
    }
    return UsageRecord(record_id, **{**fields, **changes})


async def test_a_record_is_written_once_however_often_it_is_closed(
    redis_url: str, redis_client: redis.Redis, pool: str
) -> None:
    ledger = RedisLedger(redis_url, pool=pool, gateway_id="me", max_records=100)
    await ledger.open(usage())
    await ledger.note([usage(generated_tokens=5), usage("not open")])
    closings = await asyncio.gather(*(ledger.close(usage(outcome="completed")) for _ in range(5)))
    assert sorted(closings) == [False] * 4 + [True]
    await ledger.note([usage(generated_tokens=6)])
    assert await ledger.reap() == 0
    assert len(records(redis_client, pool)) == 1
    await ledger.leave()
    assert redis_client.smembers(PoolKeys(pool).ledger_owners) == set()


async def test_what_a_store_has_lost_is_written_all_the_same(
    redis_url: str, redis_client: redis.Redis, pool: str
) -> None:
    ledger = RedisLedger(redis_url, pool=pool, gateway_id="me", max_records=100)
    await ledger.open(usage())
    redis_client.delete(PoolKeys(pool).open_records("me"))
    assert await ledger.close(usage(outcome="completed"))
    assert not await ledger.close(usage(outcome="completed"))
    assert [record["outcome"] for record in records(redis_client, pool)] == ["completed"]
    await ledger.leave()


async def test_a_gateway_that_was_thought_dead_replaces_what_others_wrote(
    redis_url: str, redis_client: redis.Redis, pool: str
) -> None:
    me, other = (RedisLedger(redis_url, pool=pool, gateway_id=name, max_records=100) for name in ("me", "other"))
    await me.open(usage())
    assert await other.reap() == 1  # there is no sign of life of anybody
    assert [record["outcome"] for record in records(redis_client, pool)] == ["lost"]
    await me.note([usage(generated_tokens=6)])
    closings = [await me.close(usage(outcome="completed", generated_tokens=7)) for _ in range(2)]
    assert closings == [True, False]
    [record] = records(redis_client, pool)
    assert (record["outcome"], record["generated_tokens"]) == ("completed", "7")
    await me.leave()
    await other.leave()


async def test_a_record_that_is_opened_again_after_it_was_reaped_stays_one(
    redis_url: str, redis_client: redis.Redis, pool: str
) -> None:
    """An opening is repeated whose answer was lost, as the gateway was cut off until it was taken for dead."""
    me, other = (RedisLedger(redis_url, pool=pool, gateway_id=name, max_records=100) for name in ("me", "other"))
    for generated_tokens in (2, 3):
        await me.open(usage(generated_tokens=generated_tokens))
        assert await other.reap() == 1
        [record] = records(redis_client, pool)
        assert (record["outcome"], record["generated_tokens"]) == ("lost", str(generated_tokens))
    await me.open(usage())
    closings = [await me.close(usage(outcome="completed", generated_tokens=7)) for _ in range(2)]
    assert closings == [True, False]
    [record] = records(redis_client, pool)
    assert (record["outcome"], record["generated_tokens"]) == ("completed", "7")
    assert not redis_client.exists(PoolKeys(pool).reaped_records("me"))
    await me.leave()
    await other.leave()


async def test_what_a_dead_gateway_had_reserved_is_settled_unless_another_has_it_now(
    redis_url: str, redis_client: redis.Redis, pool: str
) -> None:
    def limiter(gateway: str) -> RedisLimiter:
        return RedisLimiter(
            redis_url, pool=pool, gateway_id=gateway, clock=SystemClock(), uniform=lambda low, _: low, settings=None
        )

    keys = PoolKeys(pool)
    limits = TenantLimits(tokens_per_minute=1000, max_concurrent=2)
    dead, living = limiter("dead"), limiter("living")
    ledger, other = (RedisLedger(redis_url, pool=pool, gateway_id=name, max_records=9) for name in ("dead", "living"))
    for request_id in ("acme/left", "acme/taken over"):
        await dead.reserve("acme", request_id, Cost(5, 300), limits)
        await ledger.open(usage(request_id, request_id=request_id, prompt_tokens=5, generated_tokens=7, num_attempts=1))
    await living.reserve("acme", "acme/taken over", Cost(5, 300), limits)
    assert await other.reap() == 2
    assert redis_client.exists(keys.reservation("acme/left")) == 0
    assert redis_client.zrange(keys.running("acme"), 0, -1) == ["acme/taken over"]
    assert redis_client.hmget(keys.window("acme"), "r", "t") == ["2", str((5 + 7) + (5 + 300))]
    await living.settle("acme", "acme/taken over", num_prompt_tokens=5, num_output_tokens=9)
    assert redis_client.zrange(keys.running("acme"), 0, -1) == []
    for each in (ledger, other):
        await each.leave()
    for each in (dead, living):
        await each.close()


async def test_the_ledger_has_a_bound(redis_url: str, redis_client: redis.Redis, pool: str) -> None:
    ledger = RedisLedger(redis_url, pool=pool, gateway_id="me", max_records=100)
    for number in range(1000):
        await ledger.open(usage(str(number)))
        await ledger.close(usage(str(number), outcome="completed"))
    kept = records(redis_client, pool)
    assert 100 <= len(kept) < 400
    assert kept[-1]["record_id"] == "999"
    await ledger.leave()


async def test_a_store_that_is_gone_is_said(tmp_path: Any) -> None:
    ledger = RedisLedger(f"unix://{tmp_path}/nothing.sock", pool="p", gateway_id="me", max_records=10)
    for call in (ledger.open(usage()), ledger.note([usage()]), ledger.close(usage()), ledger.reap(), ledger.leave()):
        with pytest.raises(UnavailableError):
            await call
