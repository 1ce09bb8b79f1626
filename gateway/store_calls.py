"""Calls of the store whose callers cannot do without it: answered soon, or refused and undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from common.errors import TidegateError
from gateway.background import Background
from gateway.store_health import StoreHealth

T = TypeVar("T")


class StoreCalls:
    """Asks with the patience that a client has with a store that may be lost."""

    def __init__(
        self,
        store: StoreHealth,
        background: Background,
        is_answered: Callable[[asyncio.Future[Any], float], Awaitable[bool]],
        *,
        patience_s: float,
    ) -> None:
        """`is_answered(step, patience_s)` waits for calls of the store; False once it is silent for so long."""
        self._store = store
        self._background = background
        self._is_answered = is_answered
        self._patience_s = patience_s

    async def ask(
        self, step: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], Awaitable[None]] | None = None
    ) -> T:
        """What the store answers. Raises UnavailableError once it is silent, and at once while it is lost.

        `undo` takes back what it has done after all, if nobody waits for the answer any more.
        """
        self._store.check()
        task: asyncio.Task[T] = self._background.spawn(step(), "ask")
        is_answered = False
        try:
            is_answered = await self._is_answered(task, self._patience_s)
        finally:
            if not is_answered and undo is not None:
                self._background.spawn(self._undo(task, undo), "undo")
        if not is_answered:
            raise self._store.unavailable()
        return task.result()

    async def _undo(self, task: asyncio.Task[T], undo: Callable[[T], Awaitable[None]]) -> None:
        try:
            answer = await task
        except TidegateError:  # there is nothing to undo
            return
        with self._store.watched():
            await undo(answer)
