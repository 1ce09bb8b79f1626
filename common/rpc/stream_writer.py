"""Writes to one call's stream: from its task or from anywhere on the loop, one at a time, each within a bound."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Self


class StreamWriter:
    """A context manager, to be entered in the call's task. Its messages go out in the order in which they were given.

    A write takes the library some turns of the loop, to wait for which a task would be woken for each message. `begin`
    waits for nothing, and so costs no more than the write itself. There is one timer for each stream, not for each
    write.
    """

    __slots__ = (
        "__weakref__",
        "_began_at",
        "_bound_s",
        "_context",
        "_failure",
        "_is_closed",
        "_loop",
        "_timer",
        "_waiter",
        "_writing",
        "on_stuck",
    )

    def __init__(self, context: Any, bound_s: float = math.inf) -> None:
        """`context`: what messages are written to, a call or a call's context; `bound_s`: seconds that one write may
        take."""
        self._context = context
        self._bound_s = bound_s
        self._loop = asyncio.get_running_loop()
        self._writing: Coroutine[Any, Any, None] | None = None
        self._began_at: float | None = None  # of the write that is under way, or has failed
        self._waiter: asyncio.Future[None] | None = None  # the task waits for it to end
        self._failure: BaseException | None = None
        self._is_closed = False
        self.on_stuck: Callable[[], None] = _nothing  # a write that `begin` has begun takes longer than the bound
        self._timer = None if bound_s == math.inf else self._loop.call_later(bound_s, self._look)

    @property
    def is_free(self) -> bool:
        """Whether `begin` may be called: nothing is under way, and the task has nothing to write before that."""
        return self._writing is None and self._waiter is None and self._failure is None and not self._is_closed

    def begin(self, message: Any) -> None:
        """Writes while the stream is free. That it fails is told by the next `write`, and by the end of the call, which
        is the only cause."""
        self._began_at = self._loop.time()
        self._go_on(self._context.write(message))

    async def write(self, message: Any) -> None:
        """Writes once the stream is free. Raises TimeoutError if a write takes longer than the bound."""
        self._check()
        if self._writing is not None:
            await self._written()
            self._check()
        self.begin(message)
        if self._writing is not None:
            await self._written()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _written(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _go_on(self, writing: Coroutine[Any, Any, None]) -> None:
        """Runs a write up to where it waits for a future, as a task does, but now."""
        try:
            awaited = writing.send(None)
        except StopIteration:
            self._writing = self._began_at = None
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - of the write, and kept for who asks next
            self._writing, self._failure = None, None if self._is_closed else error
        else:
            self._writing = writing
            awaited._asyncio_future_blocking = False  # what tasks tell a future: it was awaited and not only yielded
            awaited.add_done_callback(self._on_awaited)
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_awaited(self, _: asyncio.Future[Any]) -> None:
        writing = self._writing
        assert writing is not None, "only a write under way waits"
        self._go_on(writing)

    def _look(self) -> None:
        """Runs once in a while: most often no write lasts, or one that has just begun."""
        now = self._loop.time()
        began_at = now if self._began_at is None else self._began_at
        if now - began_at < self._bound_s:
            self._timer = self._loop.call_later(began_at + self._bound_s - now, self._look)
            return
        self._failure = self._failure or TimeoutError(f"a write took longer than {self._bound_s:g} s")
        if self._waiter is None:
            self.on_stuck()
        elif not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Ends the timer. What is under way ends by itself.

        Lets go of all that may hold this writer: with a cycle, every call and its request would wait for the collector.
        """
        self._is_closed = True
        self._failure, self.on_stuck = None, _nothing
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing() -> None:
    """Nobody wants to know."""
