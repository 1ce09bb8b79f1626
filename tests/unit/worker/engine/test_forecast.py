"""Forecasts of memory: the peak is that of a simulation, and the learned length follows what requests use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Band, SamplingParams
from worker.engine.forecast import MemoryForecast, OutputForecast, ThrashMeter, num_expected, peak_tokens
from worker.engine.request import Request

LOADS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=8)


def simulated_peak(loads: list[tuple[int, int]]) -> int:
    """Every request grows by a token per step and gives all back at its end."""
    peak = 0
    for step in range(1, 1 + max((remaining for remaining, _ in loads), default=0)):
        peak = max(peak, sum(held + step for remaining, held in loads if remaining >= step))
    return peak


@given(LOADS)
def test_the_peak_is_that_of_growing_step_by_step(loads: list[tuple[int, int]]) -> None:
    assert peak_tokens(sorted(loads, reverse=True)) == simulated_peak(loads)


@given(LOADS, LOADS, st.integers(0, 400))
def test_one_more_fits_if_the_peak_with_it_does(
    loads: list[tuple[int, int]], added: list[tuple[int, int]], capacity: int
) -> None:
    forecast = MemoryForecast(loads)
    for remaining, held in added:
        everybody = [*loads, (remaining, held)]
        assert forecast.fits(remaining, held, capacity) is (simulated_peak(everybody) <= capacity)
        forecast.add(remaining, held)
        loads = everybody


@given(LOADS, st.lists(st.integers(0, 7), max_size=3), st.integers(0, 300))
def test_one_more_fits_if_the_peak_without_those_that_leave_does(
    loads: list[tuple[int, int]], leaving: list[int], capacity: int
) -> None:
    forecast = MemoryForecast(loads)
    gone = [loads[index] for index in sorted(set(leaving)) if index < len(loads)]
    left = [load for index, load in enumerate(loads) if index not in leaving]
    fits = simulated_peak([*left, (5, 20)]) <= capacity
    assert forecast.fits(5, 20, capacity, gone) is fits
    for load in gone:
        forecast.remove(*load)
    assert forecast.fits(5, 20, capacity) is fits


def test_removing_what_is_not_there_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no request has 3 tokens to come"):
        MemoryForecast([(4, 1)]).remove(3, 1)


def ended(num_output: int, max_tokens: int) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    request = Request("r", 1, 1, [1] * (5 + num_output), 5, sampling, Band.NORMAL, "", 1)
    request.max_total_tokens = 5 + max_tokens
    return request


def test_the_share_follows_what_finished_requests_used() -> None:
    outputs = OutputForecast(optimism=1.0, first_guess=0.9)
    assert outputs.share(0) == pytest.approx(0.9)
    for _ in range(300):
        outputs.observe(ended(100, 1000))
    assert outputs.share(0) == pytest.approx(0.1, abs=0.01)
    assert num_expected(ended(100, 1000), outputs.share(0)) == pytest.approx(90, abs=10)


def test_optimism_and_distrust_move_the_share_towards_all_of_it() -> None:
    shares = [OutputForecast(optimism, 0.2).share(0) for optimism in (1.0, 0.5, 0.0)]
    assert shares == pytest.approx([0.2, 0.6, 1.0])
    distrusted = [OutputForecast(0.75, 0.2).share(distrust) for distrust in (0, 0.5, 1, 7)]
    assert distrusted == pytest.approx([0.4, 0.6, 1.0, 1.0])


def test_thrash_is_the_recent_share_of_work_done_twice() -> None:
    meter = ThrashMeter(memory_steps=10)
    assert meter.ratio == 0
    for _ in range(100):
        meter.observe(40, 10)
    assert meter.ratio == pytest.approx(0.25)
    for _ in range(100):
        meter.observe(40, 0)
    assert meter.ratio < 0.01
