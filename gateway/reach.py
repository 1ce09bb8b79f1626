"""Tells the queue to which workers this gateway can submit, so that nobody claims its requests for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.placement.fleet import Fleet
from gateway.placement.worker import WorkerState
from gateway.queueing.queue import Queue
from gateway.store_health import StoreHealth


class Reach:
    """Owner of what the queue knows of this gateway's sessions."""

    def __init__(
        self, queue: Queue, fleet: Fleet, store: StoreHealth, *, ttl_s: float, on_change: Callable[[], None]
    ) -> None:
        """The queue is to remember it for `ttl_s`; `on_change` is called once it knows something new."""
        self._queue = queue
        self._fleet = fleet
        self._store = store
        self._ttl_s = ttl_s
        self._on_change = on_change
        self._told: list[str] = []
        self._telling = asyncio.Lock()

    async def tell(self) -> None:
        """Says it as it is now; to be repeated, as the queue forgets it."""
        async with self._telling:  # one after the other, or an older word could come last
            reached = sorted(s.worker_id for s in self._fleet.sessions if s.state is WorkerState.READY)
            with self._store.watched():
                await self._queue.reach(reached, ttl_s=self._ttl_s)
                if reached != self._told:
                    self._told = reached
                    self._on_change()
