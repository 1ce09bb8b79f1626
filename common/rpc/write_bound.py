"""A bound on every write of a stream, at the price of one timer for each stream instead of one for each write."""

from __future__ import annotations

import asyncio
from typing import Any, Self


class WriteBound:
    """Belongs to the task that makes it, writes and closes it; a context manager."""

    __slots__ = ("_bound_s", "_is_late", "_loop", "_since", "_task", "_timer")

    def __init__(self, bound_s: float) -> None:
        """`bound_s`: seconds that one write may take. To be called in a task."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._bound_s = bound_s
        self._since: float | None = None  # while a write lasts: when it began
        self._is_late = False
        self._timer = self._loop.call_later(bound_s, self._look)

    async def write(self, context: Any, message: Any) -> None:
        """`context.write(message)`. Raises TimeoutError if it takes longer than the bound."""
        self._since = self._loop.time()
        try:
            await context.write(message)
        except asyncio.CancelledError:
            # Both at once: who cancelled the task from outside goes first.
            if not self._is_late or self._task.uncancel() > 0:
                raise
            raise TimeoutError from None
        finally:
            self._since = None

    def _look(self) -> None:
        """Runs once in a while: most often no write lasts, or one that has just begun."""
        now = self._loop.time()
        began = now if self._since is None else self._since
        if now - began >= self._bound_s:
            self._is_late = True
            self._task.cancel()
            return
        self._timer = self._loop.call_later(began + self._bound_s - now, self._look)

    def close(self) -> None:
        """Ends the timer."""
        self._timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
