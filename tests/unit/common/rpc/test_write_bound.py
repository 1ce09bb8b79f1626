from __future__ import annotations

import asyncio

import pytest

from common.rpc.write_bound import WriteBound


class Context:
    """Takes a message when told to."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def write(self, message: str) -> None:
        await self.is_open.wait()
        self.written.append(message)


async def test_writes_within_the_bound_take_as_long_as_they_like_together() -> None:
    context = Context()
    with WriteBound(0.05) as bound:
        end = asyncio.get_running_loop().time() + 0.2
        while asyncio.get_running_loop().time() < end:
            await bound.write(context, "a")
            await asyncio.sleep(0.01)
    assert set(context.written) == {"a"}


async def test_a_write_past_the_bound_raises_and_the_task_goes_on() -> None:
    context = Context()
    with WriteBound(0.02) as bound:
        await bound.write(context, "a")
        context.is_open.clear()
        with pytest.raises(TimeoutError):
            await bound.write(context, "b")
    await asyncio.sleep(0)  # nothing of the cancellation is left
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert context.written == ["a"]


async def test_a_pause_between_writes_is_no_slow_write() -> None:
    context = Context()
    with WriteBound(0.02) as bound:
        await bound.write(context, "a")
        await asyncio.sleep(0.1)
        await bound.write(context, "b")
    assert context.written == ["a", "b"]


async def test_who_cancels_from_outside_is_obeyed() -> None:
    context = Context()
    context.is_open.clear()
    has_begun = asyncio.Event()

    async def stream() -> None:
        with WriteBound(60.0) as bound:
            has_begun.set()
            await bound.write(context, "a")

    task = asyncio.create_task(stream())
    await has_begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_timer_is_left() -> None:
    context = Context()
    with WriteBound(0.01) as bound:
        await bound.write(context, "a")
    # A timer that was left would cancel this.
    await asyncio.sleep(0.05)
