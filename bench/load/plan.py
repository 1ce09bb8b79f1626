"""What a measurement consists of: its points (rates or concurrencies) and the requests of each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.load import arrivals
from bench.load.arrivals import Process
from bench.load.driver import Loop
from bench.load.record import LoadRequest
from bench.load.shapes import Fitted, Shape, TokenSource
from bench.load.tenants import Sender, assign
from common.types import Band

DEFAULT_REQUESTS = 100
WARMUP_OUTPUT_TOKENS = 16

Source = Callable[[int | None], Fitted]
"""So many requests of a workload (fewer if it has no more; None: as many as it has, or the default)."""


class PlanError(ValueError):
    """Options that cannot go together; the message says why."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run: an offered rate in requests a second (open loop) or a number of users (closed loop), or neither:
    a trace at its own times."""

    rate: float | None = None
    concurrency: int | None = None
    repeat: int = 0

    @property
    def label(self) -> str:
        """What the run is called."""
        if self.concurrency is not None:
            name = f"concurrency {self.concurrency}"
        else:
            name = "trace times" if self.rate is None else f"rate {self.rate:.4g}"
        return f"{name}, repeat {self.repeat}" if self.repeat else name

    @property
    def offered(self) -> float | None:
        """The number that a sweep varies."""
        return self.rate if self.concurrency is None else self.concurrency


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what is sent, and when. The same plan gives the same requests."""

    source: Source
    senders: tuple[Sender, ...]
    vocab_size: int
    bands: Mapping[Band, float] = field(default_factory=dict)  # asked for, by share; empty: each tenant's own
    process: Process = Process.POISSON
    burstiness: float = 1.0
    burst_size: int = 16
    time_scale: float = 1.0
    num_requests: int | None = None
    duration_s: float | None = None  # of arrivals, or of starts in a closed loop
    max_in_flight: int | None = None
    seed: int = 0

    def loop(self, point: Point) -> Loop:
        """How the requests of a point follow each other."""
        return Loop(point.concurrency, self.max_in_flight, self.duration_s)

    def requests(self, point: Point, run: int) -> list[LoadRequest]:
        """The requests of a point in order of arrival.

        Lengths, tenants and the pattern of arrivals are those of the seed and the repeat, the same for all points;
        the tokens differ from run to run (`run` numbers them), so no run finds another's prompts in a prefix cache.
        Raises PlanError if a trace without arrivals is to be replayed.
        """
        wanted, limit_s = self.num_requests, self.duration_s
        if wanted is None and limit_s is not None and point.rate is not None:
            wanted, limit_s = (
                max(1, round(point.rate * limit_s)),
                None,
            )  # so many arrive in that time, no more and no less
        shapes = self.source(wanted).shapes
        times = self._arrivals(shapes, point)
        pairs = [(shape, at) for shape, at in zip(shapes, times, strict=True) if limit_s is None or at < limit_s]
        tokens = TokenSource(f"{self.seed}/{run}", self.vocab_size)
        rng = random.Random(f"{self.seed}/origins")
        origins = assign([shape.client for shape, _ in pairs], self.senders, dict(self.bands), rng)
        return [
            LoadRequest(index, shape.kind, origin, tokens.prompt(shape), shape.num_output, at)
            for index, ((shape, at), origin) in enumerate(zip(pairs, origins, strict=True))
        ]

    def warmups(self, number: int) -> list[LoadRequest]:
        """Requests to be sent before, with short answers and prompts of their own."""
        tokens = TokenSource(f"{self.seed}/warmup", self.vocab_size)
        shapes = self.source(number).shapes[:number]
        origins = assign([""] * len(shapes), self.senders, {}, random.Random(f"{self.seed}/warmup"))
        return [
            LoadRequest(index, "warmup", origin, tokens.prompt(shape), min(shape.num_output, WARMUP_OUTPUT_TOKENS))
            for index, (shape, origin) in enumerate(zip(shapes, origins, strict=True))
        ]

    def _arrivals(self, shapes: tuple[Shape, ...], point: Point) -> list[float]:
        if point.concurrency is not None:
            return [0.0] * len(shapes)
        if self.process is Process.TRACE:
            times = [shape.arrival_s for shape in shapes if shape.arrival_s is not None]
            if len(times) < len(shapes):
                raise PlanError("this workload has no arrivals of its own: give --rate or --concurrency")
            return arrivals.from_trace(times, time_scale=self.time_scale, rate=point.rate)
        if point.rate is None:
            raise PlanError(f"{self.process.value} arrivals need a rate: give --rate")
        if self.process is Process.CONSTANT:
            return arrivals.constant(len(shapes), point.rate)
        if self.process is Process.BURST:
            return arrivals.bursts(len(shapes), point.rate, self.burst_size)
        burstiness = 1.0 if self.process is Process.POISSON else self.burstiness
        rng = random.Random(f"{self.seed}/{point.repeat}/arrivals")
        return arrivals.gamma(len(shapes), point.rate, burstiness, rng)
