"""Waiting for a server with patience: it is up once the server has been silent for too long, towards everybody."""

from __future__ import annotations

import asyncio
from typing import Any

_TICK_S = 0.005


class Patience:
    """One timer for all who wait. Belongs to one event loop.

    Who comes when the server has been silent for long already does not wait for it again.
    """

    def __init__(self) -> None:
        self._quiet_s = 0.0  # for which somebody has waited since it was heard last
        self._is_heard = False  # since the last look
        self._looked_at = 0.0
        self._waiters: dict[asyncio.Future[None], tuple[asyncio.Future[Any], float]] = {}  # for what, in seconds
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        """The server has said something, and its answers have been handed out."""
        self._quiet_s = 0.0
        self._is_heard = True
        for waiter, (step, _) in self._waiters.items():
            if step.done() and not waiter.done():  # a turn of the loop before the step itself tells
                waiter.set_result(None)

    async def is_answered(self, step: asyncio.Future[Any], patience_s: float) -> bool:
        """Waits for calls to end; False once the server has been silent for so long."""
        if step.done() or self._quiet_s >= patience_s:
            return step.done()
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def wake(_: object) -> None:
            if not waiter.done():
                waiter.set_result(None)

        self._waiters[waiter] = step, patience_s
        if self._timer is None:
            self._is_heard, self._looked_at = False, loop.time()
            self._timer = loop.call_later(_TICK_S, self._look)
        step.add_done_callback(wake)
        try:
            await waiter
        finally:
            del self._waiters[waiter]
            step.remove_done_callback(wake)
        return step.done()

    def _look(self) -> None:
        if not self._waiters:
            self._timer = None
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_TICK_S, self._look)
        now = loop.time()
        # While this program itself was held up, answers may have come that it has not read yet.
        passed_s, self._looked_at = min(now - self._looked_at, 2 * _TICK_S), now
        if self._is_heard:
            self._is_heard = False
            return
        self._quiet_s += passed_s
        for waiter, (_, patience_s) in self._waiters.items():
            if self._quiet_s >= patience_s and not waiter.done():
                waiter.set_result(None)
