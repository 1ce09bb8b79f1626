from __future__ import annotations

import asyncio

import pytest

from common.waiting import done_within


async def test_what_is_done_in_time_is_told_and_left_to_its_owner() -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_exception, ValueError("for its owner"))
    assert await done_within(future, 60.0)
    assert await done_within(future, 0.0)
    with pytest.raises(ValueError, match="for its owner"):
        await future


@pytest.mark.parametrize("timeout_s", [0.01, 0.0, -1.0])
async def test_what_is_late_goes_on(timeout_s: float) -> None:
    future = asyncio.get_running_loop().create_future()
    assert not await done_within(future, timeout_s)
    future.set_result(7)
    assert await future == 7


async def test_a_cancelled_waiter_leaves_it_alone() -> None:
    task = asyncio.create_task(asyncio.sleep(60.0))
    waiting = asyncio.create_task(done_within(task, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not task.done()
    task.cancel()


async def test_a_cancelled_future_is_done() -> None:
    task = asyncio.create_task(asyncio.sleep(60.0))
    asyncio.get_running_loop().call_soon(task.cancel)
    assert await done_within(task, None)
