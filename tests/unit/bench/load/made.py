"""Records, runs and a time of one's own, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.load.campaign import Run
from bench.load.goodput import GoodputRule
from bench.load.plan import Point
from bench.load.record import OK, LoadRequest, Record
from bench.load.results import Setup
from bench.load.scrape import Sample, Timeline
from bench.load.summary import summarize
from bench.load.tenants import Origin, Sender
from common.types import Band, Usage

ACME = Sender("acme", "key-acme", band=Band.HIGH)
LOW = Sender("bulk", "key-bulk", band=Band.LOW)


def request(index: int = 0, *, sender: Sender = ACME, num_prompt: int = 10, num_output: int = 4) -> LoadRequest:
    return LoadRequest(index, "dialogue", Origin(sender), (7,) * num_prompt, num_output)


def completed(
    scheduled_s: float, token_times: Sequence[float], *, index: int = 0, sender: Sender = ACME, cached: int = 0
) -> Record:
    """A request whose tokens came one by one at these times; the last one ended it."""
    asked = request(index, sender=sender, num_output=len(token_times))
    record = Record(asked, scheduled_s, sent_s=scheduled_s, end_s=token_times[-1], status=OK)
    record.deliveries = [(at, 1) for at in token_times]
    record.usage = Usage(len(asked.prompt), cached, len(token_times))
    record.queue_s = 0.0
    return record


def ended_badly(
    status: str, *, reason: str = "", scheduled_s: float = 0.0, end_s: float = 0.1, sender: Sender = ACME
) -> Record:
    return Record(request(sender=sender), scheduled_s, sent_s=scheduled_s, end_s=end_s, status=status, reason=reason)


RULE = GoodputRule(ttft_ms=1000)
SETUP = Setup("model <1>", {"name": "mixed"}, {"arrivals": "poisson"}, [{"id": "acme"}, {"id": "bulk"}], RULE)


def run_of(point: Point, records: list[Record], *, num_planned: int | None = None) -> Run:
    duration_s = max((record.end_s or 0.0 for record in records), default=0.0)
    blocks = {"referenced": 3.0, "cached": 2.0, "swapping": 0.0, "empty": 5.0}
    samples = [Sample(at, 1.0, 0.0, 2.0, blocks, at, at * 10, 5.0, 1.0) for at in (0.0, duration_s)]
    run = Run(point, 1.7e9, records, num_planned or len(records), duration_s, Timeline(samples))
    run.figures = summarize(records, duration_s, RULE)
    return run


class FakeTime:
    """A clock that goes on only when everybody sleeps, and then to the first who wakes."""

    def __init__(self) -> None:
        self.now = 100.0
        self._wake_times: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1.7e9 + self.now

    async def sleep(self, seconds: float) -> None:
        wake_time = self.now + seconds
        self._wake_times.append(wake_time)
        try:
            while True:
                for _ in range(10):  # until the others have done what they can do at this time
                    await asyncio.sleep(0)
                if wake_time == min(self._wake_times):
                    self.now = wake_time
                    return
        finally:
            self._wake_times.remove(wake_time)
