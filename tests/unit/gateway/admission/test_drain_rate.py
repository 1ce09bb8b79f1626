from __future__ import annotations

from random import Random

import pytest

from gateway.admission.drain_rate import DrainRate


def steady(per_s: float, seconds: int) -> DrainRate:
    rate = DrainRate(lambda low, high: 1.0)
    for index in range(int(per_s * seconds)):
        rate.count(index / per_s)
    return rate


@pytest.mark.parametrize("per_s", [2.0, 10.0, 100.0])
def test_the_delay_is_what_the_rate_says(per_s: float) -> None:
    assert steady(per_s, 300).retry_after_s(int(10 * per_s), 300.0) == pytest.approx(10, rel=0.1)


def test_delays_have_bounds() -> None:
    assert steady(100, 300).retry_after_s(1, 300.0) == 1
    assert steady(1, 300).retry_after_s(10_000, 300.0) == 60
    assert DrainRate(lambda low, high: 1.0).retry_after_s(1, 5.0) == 60


def test_a_queue_that_stopped_is_noticed() -> None:
    rate = steady(10, 300)
    assert rate.retry_after_s(100, 300.0) < rate.retry_after_s(100, 360.0) <= 60


def test_clients_refused_together_come_back_apart() -> None:
    rate = DrainRate(Random(1).uniform)
    delays = [rate.retry_after_s(10, 1.0) for _ in range(200)]
    assert min(delays) < 60 * 0.85
    assert max(delays) > 60 * 1.15
