"""The figures, against numpy and against sums made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.goodput import GoodputRule
from bench.load.record import INTERRUPTED
from bench.load.summary import (
    GROUPINGS,
    Distribution,
    cumulative_service,
    in_flight,
    output_rate,
    percentile,
    summarize,
    summarize_by,
)
from tests.unit.bench.load.made import ACME, LOW, completed, ended_badly

VALUES = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-9)


@given(VALUES)
def test_mean_median_and_deviation_are_numpys(values: list[float]) -> None:
    figures = Distribution.of(values).to_json("x")
    assert figures["mean_x_ms"] == pytest.approx(float(np.mean(values)) * 1e3, abs=1e-3)
    assert figures["median_x_ms"] == pytest.approx(float(np.median(values)) * 1e3, abs=1e-3)
    assert figures["std_x_ms"] == pytest.approx(float(np.std(values)) * 1e3, rel=1e-6, abs=1e-2)
    assert figures["p99_x_ms"] == pytest.approx(float(np.percentile(values, 99)) * 1e3, abs=1e-3)


def test_nothing_measured_is_null_and_not_zero() -> None:
    assert set(Distribution.of([None]).to_json("x").values()) == {None}
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 50)


def test_each_metric_has_its_definition() -> None:
    record = completed(1.0, [1.5, 1.7, 2.3])
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.4)
    assert record.itl_s == pytest.approx([0.2, 0.6])
    assert record.e2e_s == pytest.approx(1.3)


def test_several_tokens_in_one_delivery_make_one_gap_but_count_for_tpot() -> None:
    record = completed(0.0, [1.0, 1.1, 1.2, 1.3, 1.4])
    record.deliveries = [(1.0, 1), (1.4, 4)]
    assert record.itl_s == pytest.approx([0.4])
    assert record.tpot_s == pytest.approx(0.1)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    assert completed(0.0, [1.0]).tpot_s is None


def test_whatever_did_not_complete_is_counted_and_in_no_percentile() -> None:
    records = [
        completed(0.0, [0.5, 1.0], cached=4),
        completed(0.0, [1.5, 2.0]),
        ended_badly("RESOURCE_EXHAUSTED", reason="QUEUE_FULL"),
        ended_badly("RESOURCE_EXHAUSTED", reason="QUEUE_FULL"),
        ended_badly("UNAVAILABLE", reason="WORKER_LOST", end_s=9.0),
        ended_badly(INTERRUPTED),
    ]
    figures = summarize(records, 10.0, GoodputRule(ttft_ms=1000))
    counts = {name: figures[name] for name in ("num_prompts", "completed", "failed", "refused", "interrupted")}
    assert counts == {"num_prompts": 6, "completed": 2, "failed": 3, "refused": 2, "interrupted": 1}
    assert figures["failures"] == {"RESOURCE_EXHAUSTED/QUEUE_FULL": 2, "UNAVAILABLE/WORKER_LOST": 1}
    assert figures["rejection_rate"] == pytest.approx(2 / 5)
    assert figures["slo_attainment"] == pytest.approx(1 / 5)
    assert figures["request_throughput"] == pytest.approx(0.2)
    assert figures["request_goodput"] == pytest.approx(0.1)
    assert figures["output_throughput"] == pytest.approx(0.4)
    assert figures["total_cached_tokens"] == 4
    assert figures["p99_e2el_ms"] == pytest.approx(1990.0)


def test_short_answers_are_counted() -> None:
    record = completed(0.0, [1.0, 2.0])
    record.usage = None
    record.deliveries = [(1.0, 1)]
    assert summarize([record], 2.0, GoodputRule())["short_answers"] == 1


def test_groups_have_figures_of_their_own() -> None:
    records = [completed(0.0, [1.0]), completed(0.0, [3.0], sender=LOW), ended_badly("INTERNAL", sender=LOW)]
    groups = summarize_by(records, GROUPINGS["band"], 3.0, GoodputRule())
    assert groups["high"]["median_ttft_ms"] == 1000.0
    assert groups["low"]["median_ttft_ms"] == 3000.0
    assert groups["low"]["failures"] == {"INTERNAL": 1}
    assert set(summarize_by(records, GROUPINGS["tenant"], 3.0, GoodputRule())) == {"acme", "bulk"}


def test_requests_in_flight_over_time() -> None:
    records = [completed(0.0, [2.0]), completed(1.0, [3.0]), completed(3.0, [4.0])]
    assert in_flight(records, [0.0, 1.5, 2.5, 3.5, 5.0]) == [1, 2, 1, 1, 0]
    figures = summarize(records, 4.0, GoodputRule())
    assert figures["max_concurrent_requests"] == 2
    assert figures["mean_concurrent_requests"] == pytest.approx(5 / 4)


def test_a_stalled_request_is_in_flight_from_its_due_time() -> None:
    late = completed(0.0, [4.0])
    late.sent_s = 3.0
    assert in_flight([late], [1.0]) == [1]
    assert late.lag_s == 3.0
    assert late.ttft_s == 4.0


def test_tokens_by_second_include_those_of_failed_requests() -> None:
    failed = ended_badly("INTERNAL")
    failed.deliveries = [(1.2, 3)]
    assert output_rate([completed(0.0, [0.5, 1.5]), failed], 2.5) == [1, 4, 0]


def test_service_counts_prompts_at_the_first_token() -> None:
    records = [completed(0.0, [1.0, 2.0], sender=ACME), completed(0.0, [2.0], sender=LOW), ended_badly("INTERNAL")]
    curves = cumulative_service(records, [0.5, 1.0, 2.0])
    assert curves == {"acme": [0.0, 12.0, 14.0], "bulk": [0.0, 0.0, 12.0]}
