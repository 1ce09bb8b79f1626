"""Fixtures for tests that need a real Redis; a conftest takes them in with `from tests.support.redis import *`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
import redis

from common.local_redis import redis_url as local_or_configured

__all__ = ["pool", "redis_client", "redis_url"]


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
    keys = sorted(redis_client.scan_iter(match=f"tidegate:{{{name}}}:*", count=1000))
    if keys:
        redis_client.delete(*keys)
    left = [key for key in keys if is_request_key(key)]
    assert not left, f"keys of requests left in the store: {left}"


def is_request_key(key: str) -> bool:
    """True for keys that exist only while some request is waiting, claimed or running."""
    return key.split("}:", 1)[1].split(":", 1)[0] in {"request", "waiting", "models", "owned", "claims", "leases"}
