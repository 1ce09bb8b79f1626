"""Fixtures for tests that need a real Redis; a conftest takes them in with `from tests.support.redis import *`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
import redis

from common.local_redis import redis_url as local_or_configured
from gateway.store.keys import PoolKeys

__all__ = ["held_keys", "pool", "pool_keys", "redis_client", "redis_url", "request_keys"]


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a real server: the one of TIDEGATE_REDIS_URL, or one that ends with the test session."""
    with local_or_configured(os.environ.get("TIDEGATE_REDIS_URL")) as url:
        yield url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A plain blocking client, for looking at what the code under test left in the store."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def pool(redis_client: redis.Redis) -> Iterator[str]:
    """A pool name of this test alone. Fails the test if a key of a request is left, then removes all its keys."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    left = request_keys(redis_client, name)
    for key in pool_keys(redis_client, name):
        redis_client.delete(key)
    assert not left, f"keys of requests left in the store: {left}"


def pool_keys(client: redis.Redis, pool: str) -> list[str]:
    """All keys of a pool."""
    return sorted(client.scan_iter(match=f"tidegate:{{{pool}}}:*", count=1000))


def request_keys(client: redis.Redis, pool: str) -> list[str]:
    """Those keys of a pool that exist only while some request is waiting, claimed or running."""
    kinds = {"request", "waiting", "flows", "line", "models", "owned", "claims", "leases", "ledger_open"}
    return _keys_of(client, pool, kinds)


def held_keys(client: redis.Redis, pool: str) -> list[str]:
    """Those keys of a pool that say what requests hold: `request_keys`, and what they have taken from limits."""
    return [*request_keys(client, pool), *_keys_of(client, pool, {"reservation", "running"})]


def _keys_of(client: redis.Redis, pool: str, kinds: set[str]) -> list[str]:
    return [key for key in pool_keys(client, pool) if key.split("}:", 1)[1].split(":", 1)[0] in kinds]


def check_window_sums(client: redis.Redis, pool: str, tenant: str) -> None:
    """What is kept of a tenant's window besides its slots agrees with them."""
    window = client.hgetall(PoolKeys(pool).window(tenant))
    for kind in "rt":
        slots = sum(int(amount) for name, amount in window.items() if name[0] == kind and name[1:].isdigit())
        assert int(window.get(kind, 0)) == slots, window
