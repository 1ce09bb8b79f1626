"""Arrivals have the rate and the spread that were asked for."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from bench.load.arrivals import bursts, constant, from_trace, gamma

NUM = 20_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_mean_and_variation(burstiness: float) -> None:
    times = gamma(NUM, 8.0, burstiness, random.Random(3))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[-1] == pytest.approx(NUM / 8.0)
    assert fmean(gaps) == pytest.approx(1 / 8.0, rel=0.001)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    times = gamma(NUM, 10.0, 1.0, random.Random(5))
    counts = [0] * 2000
    for at in times:
        counts[min(int(at), 1999)] += 1
    assert fmean(counts) == pytest.approx(10.0)
    assert pstdev(counts) ** 2 / fmean(counts) == pytest.approx(1.0, rel=0.1)


def test_the_same_seed_gives_the_same_pattern_at_every_rate() -> None:
    slow, fast = gamma(50, 1.0, 1.0, random.Random(7)), gamma(50, 4.0, 1.0, random.Random(7))
    assert fast == pytest.approx([at / 4 for at in slow])


def test_constant_and_bursts() -> None:
    assert constant(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert bursts(5, 2.0, 2) == [0.0, 0.0, 1.0, 1.0, 2.0]


def test_a_trace_is_stretched_by_factor_or_to_a_rate() -> None:
    assert from_trace([0.0, 1.0, 4.0], time_scale=0.5) == [0.0, 0.5, 2.0]
    assert from_trace([0.0, 1.0, 4.0], rate=6.0) == pytest.approx([0.0, 0.125, 0.5])
    assert from_trace([0.0], rate=6.0) == [0.0]
