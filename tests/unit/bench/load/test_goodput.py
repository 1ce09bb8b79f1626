"""The rule for good requests, and the search for capacity on a made-up deployment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.goodput import CapacitySearch, GoodputError, GoodputRule, Judged, parse_rule
from tests.unit.bench.load.made import completed, ended_badly


def test_all_limits_must_hold() -> None:
    record = completed(0.0, [1.0, 1.1, 1.2])
    assert GoodputRule().is_good(record)
    assert GoodputRule(ttft_ms=1000, tpot_ms=101, e2el_ms=1200).is_good(record)
    assert not GoodputRule(ttft_ms=999).is_good(record)
    assert not GoodputRule(ttft_ms=1000, tpot_ms=99).is_good(record)
    assert not GoodputRule(e2el_ms=1100).is_good(record)


def test_one_token_has_a_tpot_of_nought_and_a_failure_is_never_good() -> None:
    assert GoodputRule(tpot_ms=1).is_good(completed(0.0, [1.0]))
    assert not GoodputRule().is_good(ended_badly("INTERNAL"))


def test_rules_are_read_and_shown() -> None:
    rule = parse_rule(["ttft:2000", "tpot:100"])
    assert rule == GoodputRule(ttft_ms=2000, tpot_ms=100)
    assert str(rule) == "TTFT ≤ 2000 ms and TPOT ≤ 100 ms"
    for parts in (["ttft"], ["itl:3"], ["ttft:-1"], ["ttft:1", "ttft:2"]):
        with pytest.raises(GoodputError, match="ttft:MS"):
            parse_rule(parts)


@settings(max_examples=60)
@given(true_capacity=st.floats(0.02, 500), start=st.floats(0.1, 50))
def test_the_search_ends_beside_the_true_capacity(true_capacity: float, start: float) -> None:
    search = CapacitySearch(start, max_points=40)
    tried: list[Judged] = []
    while (rate := search.next_rate(tried)) is not None:
        tried.append(Judged(rate, 1.0 if rate <= true_capacity else 0.1))
    found = search.capacity(tried)
    assert found is not None
    assert found <= true_capacity <= found * search.precision
    assert len(tried) <= 40


def test_the_search_keeps_to_its_number_of_points() -> None:
    search = CapacitySearch(1.0, max_points=3)
    tried = [Judged(rate, 1.0) for rate in (1.0, 2.0, 4.0)]
    assert search.next_rate(tried) is None
    assert search.capacity(tried) == 4.0


def test_a_rate_that_fails_bounds_the_capacity_even_if_a_higher_one_did_well() -> None:
    tried = [Judged(1.0, 1.0), Judged(2.0, 0.5), Judged(4.0, 1.0)]
    assert CapacitySearch(1.0).capacity(tried) == 1.0
    assert CapacitySearch(1.0).capacity([Judged(1.0, 0.2)]) is None
