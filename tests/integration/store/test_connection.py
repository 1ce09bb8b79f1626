"""The queue over a Redis that stalls, restarts or is not there, and under callers that are cancelled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import hiredis
import pytest
import pytest_asyncio
import redis
import uvloop

from common.clock import SystemClock
from common.errors import UnavailableError
from common.local_redis import LocalRedis
from common.types import Reason
from gateway.admission.limiter import Cost
from gateway.admission.limits import TenantLimits
from gateway.queueing.queue import InboxMessage, Place, WorkerRecord
from gateway.store.connection import store_errors
from gateway.store.patience import Patience
from gateway.store.redis_limiter import RedisLimiter
from gateway.store.redis_queue import QueueSettings, RedisQueue
from tests.support.queueing import entry, eventually, ids, report
from tests.support.redis import request_keys


@pytest_asyncio.fixture
async def queue(redis_url: str, pool: str) -> AsyncIterator[RedisQueue]:
    made = RedisQueue(redis_url, pool=pool, gateway_id="g1", settings=QueueSettings(timeout_s=60))
    yield made
    await made.close()


class TestCancelledCalls:
    async def test_a_call_cancelled_before_its_reply_leaves_the_reply_to_nobody(
        self, queue: RedisQueue, redis_client: redis.Redis
    ) -> None:
        names = [f"r{i}" for i in range(4)]
        for name in names:
            await queue.enqueue(entry(name, owner=f"owner-of-{name}"), max_length=99)
        redis_client.client_pause(60_000, all=False)  # ms; replies of what is sent now come only when that ends
        doomed = [asyncio.create_task(queue.owner_of(name)) for name in names]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in doomed)
        for task in doomed:
            task.cancel()
        others = [asyncio.create_task(queue.owner_of(name)) for name in reversed(names)]
        await asyncio.sleep(0.02)
        redis_client.client_unpause()
        assert await asyncio.gather(*others) == [f"owner-of-{name}" for name in reversed(names)]
        redis_client.delete(*request_keys(redis_client, queue._keys.pool))

    async def test_cancelling_at_random_moments_mixes_no_replies_and_leaves_no_request(
        self, queue: RedisQueue, redis_client: redis.Redis, pool: str
    ) -> None:
        dice = random.Random(7)
        for name in ("x", "y"):
            await queue.enqueue(entry(name, owner=f"owner-of-{name}"), max_length=9999)

        async def cancelled(call: Awaitable[object]) -> None:
            task = asyncio.ensure_future(call)
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for i in range(300):
            name = dice.choice(("x", "y"))
            await asyncio.gather(
                cancelled(queue.enqueue(entry(f"r{i}"), max_length=9999)),
                cancelled(queue.owner_of(dice.choice(("x", "y")))),
            )
            assert await queue.owner_of(name) == f"owner-of-{name}"
            if await queue.owner_of(f"r{i}") is not None and f"r{i}" in queue._live:
                await queue.finish(f"r{i}")

        async def only_two_are_left() -> bool:
            return (await queue.depths())[1].num_waiting == 2

        await eventually(only_two_are_left)
        redis_client.delete(*request_keys(redis_client, pool))

    async def test_a_cancelled_enqueue_is_withdrawn_and_its_id_is_free(
        self, queue: RedisQueue, redis_client: redis.Redis
    ) -> None:
        redis_client.client_pause(60_000, all=False)
        entering = queue.enqueue(entry("a"), max_length=9)
        await asyncio.sleep(0.01)
        assert entering.cancel()
        redis_client.client_unpause()

        async def is_gone() -> bool:
            return await queue.owner_of("a") is None and not queue._link._steps - {asyncio.current_task()}

        await eventually(is_gone)
        await queue.enqueue(entry("a"), max_length=9)
        assert await queue.owner_of("a") == "g1"
        assert await queue.finish("a")


async def test_a_heartbeat_removes_nothing_that_is_enqueued_anew_while_it_removes_others(
    queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.heartbeat(ttl_s=60)
    queue._doubtful.update({"a", "b"})
    finish = queue.finish

    async def finish_and_enqueue(request_id: str) -> bool:
        answer = await finish(request_id)
        if request_id == "a":
            assert await queue.enqueue(entry("b"), max_length=9)
        return answer

    monkeypatch.setattr(queue, "finish", finish_and_enqueue)
    assert await queue.heartbeat(ttl_s=60) == []
    assert await queue.owner_of("b") == "g1"
    assert await finish("b")


async def test_what_an_ended_request_has_not_paid_for_costs_a_later_one_of_its_id_nothing(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TenantLimits(max_concurrent=5)
    limiter = RedisLimiter(redis_url, pool=pool, gateway_id="g1", clock=SystemClock(), uniform=lambda low, _: low)
    try:
        await limiter.renew()
        for name in ("a", "b"):
            await limiter.reserve("acme", name, Cost(1, 1), limits)
            limiter._unsettled[name] = "acme", 1  # the store did not answer
        send = limiter._send_settle

        async def settle_and_reserve() -> None:
            await send("acme", "a", 1)
            await limiter.reserve("acme", "b", Cost(1, 1), limits)

        def send_and_reserve(tenant: str, request_id: str, tokens: int) -> asyncio.Future[Any]:
            if request_id == "a":
                return asyncio.ensure_future(settle_and_reserve())
            return send(tenant, request_id, tokens)

        monkeypatch.setattr(limiter, "_send_settle", send_and_reserve)
        await limiter.renew()
        [left] = await limiter.remaining({"acme": limits})
        assert left.concurrent == 4, "the later one has its slot"
        assert limiter._unsettled == {}
    finally:
        await limiter.close()


class TestRestart:
    async def test_an_emptied_script_cache_is_not_noticed(self, queue: RedisQueue, redis_client: redis.Redis) -> None:
        await queue.enqueue(entry("a"), max_length=9)
        redis_client.script_flush()
        assert ids(await queue.dispatch([report()])) == ["a"]
        assert await queue.finish("a")

    async def test_after_a_restart_the_queue_serves_again_and_tells_what_it_lost(self, tmp_path: Path) -> None:
        server = LocalRedis(tmp_path)
        server.start()
        queue = RedisQueue(server.url, pool="p", gateway_id="g1", settings=QueueSettings(timeout_s=30))
        try:
            await queue.enqueue(entry("lost"), max_length=9)
            await queue.send_cancel("lost")
            assert await queue.read_inbox(timeout_s=10) == [InboxMessage("cancel", "lost")]
            server.stop()
            with pytest.raises(UnavailableError) as caught:
                await queue.dispatch([report()])
            assert caught.value.reason is Reason.STORE_UNAVAILABLE
            with pytest.raises(UnavailableError):
                await queue.read_inbox(timeout_s=10)
            server.start()
            assert await queue.heartbeat(ttl_s=60) == ["lost"]
            await queue.finish("lost")
            assert await queue.heartbeat(ttl_s=60) == []
            await queue.enqueue(entry("b"), max_length=9)
            assert ids(await queue.dispatch([report()])) == ["b"]
            await queue.send_cancel("b")
            assert await queue.read_inbox(timeout_s=10) == [InboxMessage("cancel", "b")]
            await queue.finish("b")
        finally:
            await queue.close()
            server.stop()


class TestStall:
    async def test_a_silent_server_is_unavailable_and_its_late_effects_are_undone(self, tmp_path: Path) -> None:
        with LocalRedis(tmp_path) as server:
            assert server.pid is not None
            queue = RedisQueue(server.url, pool="p", gateway_id="g1", settings=QueueSettings(timeout_s=1))
            await queue.enqueue(entry("served"), max_length=9)
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(UnavailableError):
                await queue.enqueue(entry("doubtful"), max_length=9)
            with pytest.raises(UnavailableError):
                await queue.finish("served")
            os.kill(server.pid, signal.SIGCONT)

            async def answers() -> bool:
                try:
                    return (await queue.depths())[1].num_waiting >= 0
                except UnavailableError:
                    return False

            await eventually(answers)
            assert await queue.heartbeat(ttl_s=60) == []
            with redis.Redis.from_url(server.url, decode_responses=True) as client:
                assert request_keys(client, "p") == []
            await queue.close()


CALLS: dict[str, Callable[[RedisQueue], Awaitable[object]]] = {
    "enqueue": lambda queue: queue.enqueue(entry("a"), max_length=1),
    "dispatch": lambda queue: queue.dispatch(),
    "requeue": lambda queue: queue.requeue(entry("a"), attempt=1, place=Place.SAME),
    "finish": lambda queue: queue.finish("a"),
    "owner_of": lambda queue: queue.owner_of("a"),
    "send_cancel": lambda queue: queue.send_cancel("a"),
    "read_inbox": lambda queue: queue.read_inbox(timeout_s=5),
    "announce": lambda queue: queue.announce(WorkerRecord("w", 1, "h:1", "m", draining=False), ttl_s=1),
    "workers": lambda queue: queue.workers(),
    "forget_worker": lambda queue: queue.forget_worker("w", epoch=1),
    "heartbeat": lambda queue: queue.heartbeat(ttl_s=1),
    "depths": lambda queue: queue.depths(),
    "close": lambda queue: queue.close(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_without_a_server_every_method_says_unavailable(tmp_path: Path, name: str) -> None:
    queue = RedisQueue(f"unix://{tmp_path}/none.sock", pool="p", gateway_id="g1")
    with pytest.raises(UnavailableError) as caught:
        await CALLS[name](queue)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert caught.value.retry_after_s is not None
    assert str(tmp_path) not in caught.value.message


async def test_a_thousand_calls_at_once_share_a_few_connections(
    queue: RedisQueue, redis_client: redis.Redis, pool: str
) -> None:
    before = redis_client.info("clients")["connected_clients"]
    names = [f"r{i}" for i in range(1000)]
    await asyncio.gather(*(queue.enqueue(entry(name), max_length=2000) for name in names))
    assert redis_client.info("clients")["connected_clients"] - before <= 2
    assert (await queue.depths())[1].num_waiting == 1000
    assert all(await asyncio.gather(*(queue.finish(name) for name in names)))


@pytest.mark.parametrize(
    "words",
    [
        *("LOADING Redis is loading", "OOM command not allowed", "READONLY You can't write", "NOAUTH required"),
        *("MISCONF Errors writing to the AOF file", "BUSY Redis is busy running a script", "NOREPLICAS Not enough"),
    ],
)
async def test_a_server_that_refuses_whatever_is_asked_is_unavailable(words: str) -> None:
    """It is at fault and not the call: loops that ask go on, and clients are told to come back."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        commands = hiredis.Reader()
        while data := await reader.read(65536):
            commands.feed(data)
            while commands.gets() is not False:
                writer.write(f"-{words}\r\n".encode())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        queue = RedisQueue(f"redis://127.0.0.1:{port}", pool="p", gateway_id="g1")
        with pytest.raises(UnavailableError):
            await queue.depths()
        with pytest.raises(UnavailableError):
            await queue.read_inbox(timeout_s=5)
        with pytest.raises(UnavailableError):
            await queue.close()


@pytest.mark.parametrize("pool_name", ["", "a b", "a}b", "a{b", "x" * 65])
def test_a_pool_name_that_could_break_the_hash_tag_is_refused(pool_name: str) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        RedisQueue("redis://localhost", pool=pool_name, gateway_id="g1")


def test_a_connection_that_breaks_in_this_very_moment_is_an_outage() -> None:
    """The event loop that the gateway runs on raises an error of its own between a loss and the word of it."""

    async def main() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", port)
        transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError), store_errors():
            transport.writelines([b"PING"])

    uvloop.run(asyncio.wait_for(main(), 60))


def test_other_errors_are_no_outage() -> None:
    with pytest.raises(RuntimeError), store_errors():
        raise RuntimeError("a fault of our own")


class TestPatience:
    """How long a caller waits for a store that says nothing."""

    async def test_who_finds_it_silent_does_not_wait_for_it_again(self) -> None:
        patience, never = Patience(), asyncio.get_running_loop().create_future()
        assert not await patience.is_answered(never, 0.03)
        assert await _at_once(patience.is_answered(never, 0.03)) is False
        assert await _at_once(patience.is_answered(never, 60.0)) is None, "one of more patience goes on"
        patience.heard()
        assert await _at_once(patience.is_answered(never, 0.03)) is None

    async def test_a_store_that_answers_others_is_not_silent(self) -> None:
        loop = asyncio.get_running_loop()
        patience, step = Patience(), loop.create_future()
        for number in range(40):
            loop.call_later(0.005 * number, patience.heard)
        loop.call_later(0.2, step.set_result, None)
        assert await patience.is_answered(step, 0.03)

    async def test_a_stall_of_this_program_is_no_silence(self) -> None:
        loop = asyncio.get_running_loop()
        patience, step = Patience(), loop.create_future()
        waiting = asyncio.create_task(patience.is_answered(step, 0.04))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - that is the stall
        loop.call_later(0.005, step.set_result, None)
        assert await waiting


async def _at_once(call: Coroutine[Any, Any, bool]) -> bool | None:
    """What it says without waiting; None if it waits."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None
