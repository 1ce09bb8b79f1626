"""Sends requests when they are due, in an open or a closed loop, and records what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from bench.load.record import INTERRUPTED, OK, LoadRequest, Record
from client import ClientError, Delta, Event, Finished
from common.clock import Clock

Send = Callable[[LoadRequest], AsyncGenerator[Event, None]]


@dataclass(frozen=True, slots=True)
class Loop:
    """How requests follow each other.

    Open (`concurrency` None): each is due at its own arrival, whatever became of the others; with `max_in_flight`
    it may have to wait for a place, and that wait counts as latency, for it is due all the same.
    Closed: so many users, each of whom sends the next request when the last one has ended, and not after `duration_s`.
    """

    concurrency: int | None = None
    max_in_flight: int | None = None
    duration_s: float | None = None


@dataclass(slots=True)
class Progress:
    """A run as it goes, for displays."""

    num_planned: int = 0
    records: list[Record] = field(default_factory=list)  # of requests that were due so far
    num_in_flight: int = 0
    num_ended: int = 0
    num_tokens: int = 0


class Driver:
    """Drives one run; `progress` shows it while it runs and holds its records afterwards."""

    def __init__(self, send: Send, clock: Clock, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._send = send
        self._clock = clock
        self._sleep = sleep
        self._start = 0.0
        self.progress = Progress()

    async def run(self, requests: Sequence[LoadRequest], loop: Loop, stop: asyncio.Event) -> float:
        """Sends all requests and returns after the last end, or as soon as `stop` is set.

        Those under way at a stop are cancelled and recorded as interrupted. Returns the seconds it took.
        """
        self.progress.num_planned = len(requests)
        self._start = self._clock.monotonic()
        if loop.concurrency is None:
            work: Coroutine[Any, Any, None] = self._open(requests, loop.max_in_flight)
        else:
            work = self._closed(iter(requests), loop.concurrency, loop.duration_s)
        working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return self.now()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
            for record in self.progress.records:
                record.status = record.status or INTERRUPTED

    def now(self) -> float:
        """Seconds since the run's start."""
        return self._clock.monotonic() - self._start

    async def _open(self, requests: Iterable[LoadRequest], max_in_flight: int | None) -> None:
        places = asyncio.Semaphore(max_in_flight) if max_in_flight else nullcontext()
        async with asyncio.TaskGroup() as exchanges:
            for request in sorted(requests, key=lambda each: each.arrival_s):
                wait_s = request.arrival_s - self.now()
                if wait_s > 0:
                    await self._sleep(wait_s)
                exchanges.create_task(self._in_place(self._due(request, request.arrival_s), places))

    async def _in_place(self, record: Record, places: AbstractAsyncContextManager[None]) -> None:
        async with places:
            await self._exchange(record)

    async def _closed(self, requests: Iterable[LoadRequest], concurrency: int, duration_s: float | None) -> None:
        async def user() -> None:
            for request in requests:  # one iterator for all users
                now = self.now()
                if duration_s is not None and now >= duration_s:
                    return
                await self._exchange(self._due(request, now))

        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(user())

    def _due(self, request: LoadRequest, scheduled_s: float) -> Record:
        record = Record(request, scheduled_s)
        self.progress.records.append(record)
        return record

    async def _exchange(self, record: Record) -> None:
        """Sends one request and takes its answer to whatever end."""
        progress = self.progress
        record.sent_s = self.now()
        progress.num_in_flight += 1
        try:
            async with aclosing(self._send(record.request)) as events:
                async for event in events:
                    self._take(record, event)
            record.status = OK
        except ClientError as error:
            record.status, record.reason = error.status, error.reason.name if error.reason else ""
        finally:
            record.end_s = self.now()
            progress.num_in_flight -= 1
            progress.num_ended += 1

    def _take(self, record: Record, event: Event) -> None:
        if isinstance(event, Delta) and (event.token_ids or event.text):
            # A server that does not send the ids: one delivery is then counted as one token until its usage comes.
            num_tokens = len(event.token_ids) or 1
            record.deliveries.append((self.now(), num_tokens))
            self.progress.num_tokens += num_tokens
        elif isinstance(event, Finished):
            record.usage, record.queue_s = event.usage, event.timing.queue_s
