"""Many callers on one connection: order, crowds, outages, cancelled callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import redis
from redis.exceptions import ResponseError

from common.errors import UnavailableError
from common.local_redis import LocalRedis
from common.types import Reason
from gateway.store.connection import Link, Script

ECHO = "return ARGV[1]"


def script(source: str) -> Script:
    return Script("test", (), lambda _: source)


@pytest.fixture
async def link(redis_url: str) -> AsyncIterator[Link]:
    link = Link(redis_url, timeout_s=30.0)
    yield link
    await link.close()


async def test_a_crowd_waits_longer_than_any_reply_may_take(redis_url: str) -> None:
    """Each call is quick, all of them together take far longer than the time in which the store counts as lost.

    How long that is depends on the machine, which has to give even a busy server its turn within it.
    """
    busy = script("local n = 0 for i = 1, 1000000 do n = n + i end return n")
    size = "x" * 8000  # the server answers all that it has read at once together: two of these
    for timeout_s in (0.5, 2.0, 8.0):
        link = Link(redis_url, timeout_s=timeout_s)
        crowd = (link.send(busy, [], [size]) for _ in range(int(500 * timeout_s)))
        replies = await asyncio.gather(*crowd, return_exceptions=True)
        with suppress(UnavailableError):
            await link.close()
        if not any(isinstance(reply, UnavailableError) for reply in replies):
            break
    assert set(replies) == {replies[0]}
    assert isinstance(replies[0], int)


async def test_everybody_gets_the_reply_of_its_own_call(link: Link) -> None:
    """Also where the server does not know the script yet, so that some calls are sent twice and answered later."""
    echo, fails = script(ECHO + " -- everybody"), script("return redis.error_reply('no ' .. ARGV[1])")
    calls = [link.send(fails if number % 3 == 0 else echo, [], [number]) for number in range(60)]
    for number, reply in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        if number % 3 == 0:
            assert isinstance(reply, ResponseError)
            assert str(reply) == f"no {number}"
        else:
            assert reply == str(number).encode()


async def test_calls_run_in_the_order_of_their_sending_on_a_server_that_knows_only_the_later_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sources = {"put": "return redis.call('SET', KEYS[1], 'there')", "get": "return redis.call('GET', KEYS[1])"}
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server:
        former, link = Link(server.url, timeout_s=30.0), Link(server.url, timeout_s=30.0)
        assert await former.send(former.script("get", (), sources.__getitem__), ["key"], []) is None
        await former.close()
        put, get = (link.script(name, (), sources.__getitem__) for name in ("put", "get"))
        _, found = await asyncio.gather(link.send(put, ["key"], []), link.send(get, ["key"], []))
        assert found == b"there"
        await link.close()


async def test_the_reply_of_a_cancelled_call_reaches_nobody_else(link: Link) -> None:
    echo = script(ECHO + " -- cancelled")
    await link.send(echo, [], ["known"])
    calls = [asyncio.ensure_future(link.send(echo, [], [number])) for number in range(20)]
    for call in calls[::2]:
        call.cancel()
    assert await asyncio.gather(*calls[1::2]) == [str(number).encode() for number in range(1, 20, 2)]


async def test_all_that_wait_learn_of_an_outage_at_once() -> None:
    link = Link("redis://127.0.0.1:1/0", timeout_s=30.0)
    results = await asyncio.gather(*(link.send(script(ECHO), [], [1]) for _ in range(30)), return_exceptions=True)
    assert all(isinstance(each, UnavailableError) and each.reason is Reason.STORE_UNAVAILABLE for each in results)
    await link.close()


async def test_closing_waits_for_what_was_sent(redis_url: str) -> None:
    link = Link(redis_url, timeout_s=30.0)
    first, last = (link.send(script(ECHO), [], [number]) for number in (1, 2))
    last.cancel()
    await link.close()
    assert first.result() == b"1"


async def test_after_a_broken_connection_the_next_call_makes_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server:
        link = Link(server.url, timeout_s=30.0)
        for number in range(3):
            assert await link.send(script(ECHO), [], [number]) == str(number).encode()
            server.stop()
            with pytest.raises(UnavailableError):
                await link.send(script(ECHO), [], [number])
            server.start()
        await link.close()


async def test_a_link_says_who_it_is_and_selects_its_database(tmp_path_factory: pytest.TempPathFactory) -> None:
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server, redis.Redis.from_url(server.url) as client:
        client.set("who", "nought")
        client.select(3)
        client.set("who", "three")
        client.config_set("requirepass", "secret")
        get = script("return redis.call('GET', KEYS[1])")
        address = server.url.removeprefix("unix://")
        for url, answer in (
            (f"unix://:secret@{address}", b"nought"),
            (f"unix://default:secret@{address}?db=3", b"three"),
            (f"unix://:wrong@{address}", None),
            (f"unix://{address}", None),
        ):
            link = Link(url, timeout_s=30.0)
            if answer is None:
                with pytest.raises(UnavailableError):
                    await link.send(get, ["who"], [])
            else:
                assert await link.send(get, ["who"], []) == answer
            await link.close()


async def test_what_is_sent_at_once_is_on_its_way_before_the_program_goes_on(
    link: Link, redis_client: redis.Redis, pool: str
) -> None:
    put, keys = script("return redis.call('SET', KEYS[1], ARGV[1])"), [f"{pool}:{name}" for name in "abc"]
    await link.send(put, keys[:1], ["connected"])
    calls = [link.send(put, keys[:1], ["with it"]), link.send(put, keys[1:2], ["at once"], at_once=True)]
    calls.append(link.send(put, keys[2:], ["later"]))
    end = time.monotonic() + 30
    while redis_client.get(keys[1]) is None and time.monotonic() < end:  # the event loop gets no turn meanwhile
        pass
    assert redis_client.mget(keys) == ["with it", "at once", None], "in order"
    await asyncio.gather(*calls)
    assert redis_client.get(keys[2]) == "later"
    redis_client.delete(*keys)
