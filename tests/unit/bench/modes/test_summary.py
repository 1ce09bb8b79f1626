"""Best batch sizes, the theoretical ceiling, and the comparison of modes."""

from __future__ import annotations

from itertools import combinations
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.modes.summary import best, ceiling, expected_max, summarize
from bench.modes.trial import Setting, Times, Trial
from tests.unit.bench.modes.made import workload


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.data())
def test_the_expected_maximum_is_the_mean_over_all_draws(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    assert expected_max(values, count) == pytest.approx(mean(max(draw) for draw in combinations(values, count)))


@pytest.mark.parametrize("count", [0, 4])
def test_what_cannot_be_drawn_has_no_maximum(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} of 3 values"):
        expected_max([1, 2, 3], count)


def test_equal_lengths_leave_nothing_to_gain() -> None:
    assert ceiling(workload([7] * 9), 4) == pytest.approx(1.0)
    assert ceiling(workload([1, 1, 1, 97]), 4) == pytest.approx(97 / 25)
    assert ceiling(workload([1, 97]), 64) == pytest.approx(97 / 49), "there is no larger batch than all of them"


def trial(mode: str, size: int, rate: float, *, offered: float | None = None, long_end_s: float = 1.0) -> Trial:
    """Makes 100 tokens at this rate."""
    times = [Times(0.0, is_long=True, token_s=[0.5, long_end_s], end_s=long_end_s)]
    return Trial("made", Setting(mode, size), offered, seconds=100 / rate, times=times, num_output=100)


def test_a_larger_batch_must_be_faster_by_more_than_noise() -> None:
    trials = [trial("static", 32, 61.0), trial("static", 8, 40.0), trial("static", 16, 60.0)]
    chosen = best(trials)
    assert chosen is not None
    assert chosen.setting.max_num_seqs == 16
    assert best([]) is None


def test_modes_are_compared_each_at_its_best() -> None:
    made = workload([1, 9, 200, 30])
    trials = [
        trial("static", 2, 10.0, long_end_s=9.0),
        trial("static", 4, 8.0),
        trial("continuous", 2, 15.0, long_end_s=2.0),
        trial("continuous", 4, 20.0, long_end_s=3.0),
        trial("static", 2, 5.0, offered=0.25),
    ]
    figures = summarize(made, trials, ["static", "client", "continuous"])
    assert [(each.mode, each.best.setting.max_num_seqs) for each in figures.modes] == [("static", 2), ("continuous", 4)]
    static, continuous = figures.modes
    assert figures.rate == 0.25
    assert (static.offered is not None, continuous.offered is None) == (True, True)
    assert (static.num_long_done, continuous.num_long_done) == (0, 1), "when continuous had done all, after 5 s"
    size, ratio, limit = figures.gain() or (0, 0.0, 0.0)
    assert (size, ratio) == (2, pytest.approx(1.5)), "at one batch size, not each at its own"
    assert limit == pytest.approx(ceiling(made, 2))


def test_trials_of_another_workload_do_not_count() -> None:
    other = trial("static", 2, 10.0)
    other.workload = "other"
    figures = summarize(workload([1, 2]), [other], ["static"])
    assert figures.modes == ()
    assert figures.gain() is None
