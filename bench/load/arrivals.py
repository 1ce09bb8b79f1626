"""When requests arrive in an open loop: seconds from the start, drawn reproducibly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate


class Process(StrEnum):
    """How arrivals are spread."""

    POISSON = "poisson"  # independent of each other
    GAMMA = "gamma"  # gaps of a gamma distribution; burstiness says how uneven
    CONSTANT = "constant"  # equal gaps
    BURST = "burst"  # groups at once, equal gaps between groups
    TRACE = "trace"  # as the trace says


def gamma(num_requests: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Arrivals at `rate` a second whose gaps have the coefficient of variation 1/sqrt(`burstiness`).

    1 is a Poisson process; below it requests come in clumps, above it evenly. The gaps are scaled so that the
    last arrival is at num_requests / rate: the offered rate is then exactly the one asked for, whatever was drawn.
    """
    gaps = [rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(num_requests)]
    return _stretched(list(accumulate(gaps)), num_requests / rate)


def constant(num_requests: int, rate: float) -> list[float]:
    """Equal gaps, the first request at 0."""
    return [index / rate for index in range(num_requests)]


def bursts(num_requests: int, rate: float, size: int) -> list[float]:
    """Groups of `size` at one moment; `rate` is the mean over all of them."""
    return [index // size * size / rate for index in range(num_requests)]


def from_trace(arrivals: Sequence[float], *, time_scale: float = 1.0, rate: float | None = None) -> list[float]:
    """A trace's own arrivals, its times multiplied by `time_scale`, or so that the mean rate is `rate`."""
    if rate is None:
        return [at * time_scale for at in arrivals]
    return _stretched(arrivals, len(arrivals) / rate)


def _stretched(arrivals: Sequence[float], last: float) -> list[float]:
    """The arrivals with all times multiplied so that the last one is at `last`."""
    if not arrivals or arrivals[-1] <= 0:
        return [0.0] * len(arrivals)
    return [at * last / arrivals[-1] for at in arrivals]
