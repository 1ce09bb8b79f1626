"""Gateways in this process on a real Redis, with scripted workers on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.integration.gateway.rig import Rig
from tests.support.redis import *  # noqa: F403


@pytest.fixture
async def rig(redis_url: str, pool: str) -> AsyncIterator[Rig]:
    """Starts gateways and workers; at the end stops them and fails the test if a task is left."""
    before = asyncio.all_tasks()
    async with Rig(redis_url, pool) as rig:
        yield rig
    before |= {task for task in [asyncio.current_task()] if task is not None}
    left = [task for task in asyncio.all_tasks() - before if not task.done() and not _is_grpcs_own(task)]
    assert not left, f"tasks left: {left}"


def _is_grpcs_own(task: asyncio.Task[object]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is None or "grpc" in code.co_filename
