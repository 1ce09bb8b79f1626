"""Runs the points of a measurement one after the other, and keeps whatever was measured, come what may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count

from bench.load.driver import Driver, Loop, Progress, Send
from bench.load.goodput import CapacitySearch, GoodputRule, Judged
from bench.load.plan import Plan, Point
from bench.load.record import Record
from bench.load.scrape import Endpoints, Timeline, watch
from bench.load.summary import summarize
from common.clock import Clock


@dataclass(slots=True)
class Run:
    """One point, measured. `duration_s` is from the start to the last end."""

    point: Point
    started_at: float  # seconds since 1970
    records: list[Record]
    num_planned: int
    duration_s: float
    timeline: Timeline
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """When it began, as `vllm bench serve` writes it, UTC."""
        return datetime.fromtimestamp(self.started_at, UTC).strftime("%Y%m%d-%H%M%S")

    @property
    def is_whole(self) -> bool:
        """Whether everything planned was sent and came to an end."""
        return self.figures.get("interrupted") == 0 and len(self.records) == self.num_planned

    def figure(self, name: str) -> float | None:
        """A number among the figures."""
        value = self.figures.get(name)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all runs of a measurement have in common."""

    plan: Plan
    rule: GoodputRule
    endpoints: Endpoints = field(default_factory=Endpoints)
    scrape_interval_s: float = 0.5


OnStart = Callable[[Point, Progress], None]
OnEnd = Callable[[Run], None]


class Campaign:
    """Measures points; `runs` holds every one that was begun, also after an error or a stop."""

    def __init__(
        self,
        conditions: Conditions,
        send: Send,
        clock: Clock,
        stop: asyncio.Event,
        *,
        on_start: OnStart = lambda _point, _progress: None,
        on_end: OnEnd = lambda _run: None,
    ) -> None:
        self._conditions = conditions
        self._send = send
        self._clock = clock
        self._stop = stop
        self._on_start = on_start
        self._on_end = on_end
        self._numbers = count()
        self.runs: list[Run] = []

    async def warm_up(self, number: int) -> list[Record]:
        """Sends a few requests that are in no result, one by one."""
        driver = Driver(self._send, self._clock)
        await driver.run(self._conditions.plan.warmups(number), Loop(concurrency=1), self._stop)
        return driver.progress.records

    async def sweep(self, points: Iterable[Point]) -> None:
        """Measures each point, until a stop."""
        for point in points:
            if self._stop.is_set():
                return
            await self._measure(point)

    async def find_capacity(self, search: CapacitySearch) -> Sequence[Judged]:
        """Measures the rates that the search asks for, until it is over or stopped; returns them in order.

        It is over, too, when nothing is answered any more: that is a deployment that is down, not one that is slow.
        """
        tried: list[Judged] = []
        while (rate := search.next_rate(tried)) is not None and not self._stop.is_set():
            run = await self._measure(Point(rate=rate))
            if run.is_whole:
                tried.append(Judged(rate, run.figure("slo_attainment") or 0.0))
            if not run.figures["completed"]:
                break
        return tried

    async def _measure(self, point: Point) -> Run:
        conditions = self._conditions
        # Off the event loop: making the tokens of many long prompts takes a while, and Ctrl-C should be heard.
        requests = await asyncio.to_thread(conditions.plan.requests, point, next(self._numbers))
        driver = Driver(self._send, self._clock)
        run = Run(point, self._clock.time(), driver.progress.records, len(requests), 0.0, Timeline())
        self.runs.append(run)
        self._on_start(point, driver.progress)
        started = self._clock.monotonic()
        try:
            async with self._watched(run.timeline, started):
                await driver.run(requests, conditions.plan.loop(point), self._stop)
        finally:
            # The last end, not this moment: an idle rest of the schedule is no part of it.
            now = self._clock.monotonic() - started
            ends = [record.end_s for record in run.records if record.end_s is not None]
            run.duration_s = now if self._stop.is_set() else max(ends, default=now)
            run.figures = summarize(run.records, run.duration_s, conditions.rule)
            self._on_end(run)
        return run

    @asynccontextmanager
    async def _watched(self, timeline: Timeline, started: float) -> AsyncIterator[None]:
        watching = asyncio.create_task(
            watch(
                self._conditions.endpoints,
                timeline,
                lambda: self._clock.monotonic() - started,
                self._conditions.scrape_interval_s,
            )
        )
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
