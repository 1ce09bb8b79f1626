"""Who waits for a turn at the store, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from common.errors import UnavailableError
from common.types import Reason
from gateway.store.connection import Calls, Script, connect


def script(source: str) -> Script:
    return Script("test", (), lambda _: source)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url, max_connections=2, timeout_s=0.3)
    yield client
    await client.aclose()


async def test_a_crowd_waits_longer_than_any_reply_may_take(client: Redis) -> None:
    """Each call is quick, all of them together take far longer than the time in which the store counts as lost."""
    calls = Calls(max_running=2)
    busy = script("local n = 0 for i = 1, 1000000 do n = n + i end return n")
    replies = await asyncio.gather(*(calls.run(busy, client, [], []) for _ in range(150)))
    assert len(set(replies)) == 1


async def test_those_that_wait_learn_of_an_outage_from_the_first(redis_url: str) -> None:
    nobody = connect("redis://127.0.0.1:1/0", max_connections=1, timeout_s=0.3)
    tried: list[int] = []

    class Counted(Script):
        async def run(self, client: Redis, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
            tried.append(1)
            return await super().run(client, keys, arguments)

    calls = Calls(max_running=1)
    counted = Counted("test", (), lambda _: "return 1")
    results = await asyncio.gather(*(calls.run(counted, nobody, [], []) for _ in range(50)), return_exceptions=True)
    assert all(isinstance(each, UnavailableError) and each.reason is Reason.STORE_UNAVAILABLE for each in results)
    assert len(tried) == 1
    with pytest.raises(UnavailableError):
        await calls.run(counted, nobody, [], [])
    assert len(tried) == 2, "who comes after the outage was seen tries for itself"
    await nobody.aclose()
