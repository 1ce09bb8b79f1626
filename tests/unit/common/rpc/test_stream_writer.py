from __future__ import annotations

import asyncio

import pytest

from common.rpc.stream_writer import StreamWriter


class Context:
    """Takes a message when told to."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.failure: Exception | None = None

    async def write(self, message: str) -> None:
        await self.is_open.wait()
        await _later(None)
        if self.failure is not None:
            raise self.failure
        self.written.append(message)


async def _later(result: None) -> None:
    """Waits for a future, as the library does."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, result)
    await future


async def test_writes_within_the_bound_take_as_long_as_they_like_together() -> None:
    context = Context()
    with StreamWriter(context, 0.05) as writer:
        end = asyncio.get_running_loop().time() + 0.2
        while asyncio.get_running_loop().time() < end:
            await writer.write("a")
            await asyncio.sleep(0.01)
    assert set(context.written) == {"a"}


async def test_a_write_past_the_bound_raises_and_the_task_goes_on() -> None:
    context = Context()
    with StreamWriter(context, 0.02) as writer:
        await writer.write("a")
        context.is_open.clear()
        with pytest.raises(TimeoutError):
            await writer.write("b")
        with pytest.raises(TimeoutError):  # for good
            await writer.write("c")
        assert not writer.is_free
    await asyncio.sleep(0)  # nothing of a cancellation is left
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert context.written == ["a"]


async def test_a_pause_between_writes_is_no_slow_write() -> None:
    context = Context()
    with StreamWriter(context, 0.02) as writer:
        await writer.write("a")
        await asyncio.sleep(0.1)
        writer.begin("b")
        await asyncio.sleep(0.1)
        await writer.write("c")
    assert context.written == ["a", "b", "c"]


async def test_who_cancels_from_outside_is_obeyed() -> None:
    context = Context()
    context.is_open.clear()
    has_begun = asyncio.Event()

    async def stream() -> None:
        with StreamWriter(context, 60.0) as writer:
            has_begun.set()
            await writer.write("a")

    task = asyncio.create_task(stream())
    await has_begun.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_timer_is_left() -> None:
    context = Context()
    stuck: list[bool] = []
    with StreamWriter(context, 0.01) as writer:
        writer.on_stuck = lambda: stuck.append(True)
        context.is_open.clear()
        writer.begin("a")
    await asyncio.sleep(0.05)
    assert not stuck


async def test_what_is_begun_goes_out_before_what_the_task_writes() -> None:
    context = Context()
    context.is_open.clear()
    with StreamWriter(context, 60.0) as writer:
        writer.begin("a")
        assert not writer.is_free
        later = asyncio.create_task(writer.write("b"))
        await asyncio.sleep(0.01)
        assert context.written == []
        context.is_open.set()
        await later
        assert writer.is_free
    assert context.written == ["a", "b"]


async def test_a_begun_write_that_lasts_too_long_is_told_once_and_fails_the_next() -> None:
    context = Context()
    context.is_open.clear()
    stuck = asyncio.Event()
    with StreamWriter(context, 0.02) as writer:
        writer.on_stuck = stuck.set
        writer.begin("a")
        async with asyncio.timeout(10):
            await stuck.wait()
        with pytest.raises(TimeoutError):
            await writer.write("b")
        stuck.clear()
        await asyncio.sleep(0.06)
        assert not stuck.is_set()


async def test_a_begun_write_that_fails_is_told_by_the_next() -> None:
    context = Context()
    context.failure = ConnectionError("the client is gone")
    with StreamWriter(context, 60.0) as writer:
        writer.begin("a")
        with pytest.raises(ConnectionError):
            await writer.write("b")
        assert not writer.is_free


async def test_a_write_that_ends_at_once_leaves_the_stream_free() -> None:
    class Immediate:
        async def write(self, message: str) -> None:
            if message == "bad":
                raise ConnectionError("the client is gone")

    with StreamWriter(Immediate(), 60.0) as writer:
        writer.begin("a")
        assert writer.is_free
        await writer.write("b")
        assert writer.is_free
        writer.begin("bad")
        assert not writer.is_free
        with pytest.raises(ConnectionError):
            await writer.write("c")


async def test_nobody_overtakes_a_task_that_waits_for_its_turn() -> None:
    context = Context()
    with StreamWriter(context) as writer:
        writer.begin("a")
        later = asyncio.create_task(writer.write("b"))
        while "a" not in context.written:
            assert not writer.is_free
            await asyncio.sleep(0)
        assert not writer.is_free  # "a" is written, and the task has not run yet
        await later
        assert writer.is_free
    assert context.written == ["a", "b"]
