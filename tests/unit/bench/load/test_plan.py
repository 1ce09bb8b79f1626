"""What is sent at each point of a measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.load import shapes
from bench.load.arrivals import Process
from bench.load.plan import WARMUP_OUTPUT_TOKENS, Plan, PlanError, Point
from bench.load.shapes import Caps, Fitted, fit
from bench.traces import Trace, TraceRow
from tests.unit.bench.load.made import ACME, LOW

CAPS = Caps(context_length=8192)


def mixed(number: int | None) -> Fitted:
    return fit(shapes.mixed(number or 100, seed=0, scale=0.1), CAPS)


PLAN = Plan(mixed, (ACME, LOW), vocab_size=49_152, num_requests=40)


def test_points_of_a_sweep_differ_in_tokens_and_pace_only() -> None:
    slow, fast = PLAN.requests(Point(rate=1.0), 0), PLAN.requests(Point(rate=4.0), 1)
    for one, other in zip(slow, fast, strict=True):
        assert (one.kind, len(one.prompt), one.num_output, one.origin) == (
            other.kind,
            len(other.prompt),
            other.num_output,
            other.origin,
        )
        assert one.arrival_s == pytest.approx(other.arrival_s * 4)
    assert sum(one.prompt == other.prompt for one, other in zip(slow, fast, strict=True)) == 0


def test_the_same_plan_gives_the_same_requests() -> None:
    assert PLAN.requests(Point(rate=2.0), 3) == PLAN.requests(Point(rate=2.0), 3)


def test_a_repeat_has_arrivals_of_its_own() -> None:
    first, second = PLAN.requests(Point(rate=2.0), 0), PLAN.requests(Point(rate=2.0, repeat=1), 1)
    assert [each.arrival_s for each in first] != [each.arrival_s for each in second]


def test_a_duration_decides_how_many_arrive() -> None:
    plan = replace(PLAN, num_requests=None, duration_s=10.0, process=Process.CONSTANT)
    assert len(plan.requests(Point(rate=3.0), 0)) == 30
    assert len(replace(plan, process=Process.POISSON).requests(Point(rate=3.0), 0)) == 30
    both = replace(plan, num_requests=100)
    assert len(both.requests(Point(rate=3.0), 0)) == 30


def test_a_closed_loop_has_no_schedule() -> None:
    requests = PLAN.requests(Point(concurrency=4), 0)
    assert {request.arrival_s for request in requests} == {0.0}
    assert PLAN.loop(Point(concurrency=4)).concurrency == 4


def test_a_trace_goes_at_its_own_times_or_at_a_rate() -> None:
    rows = tuple(TraceRow(10, 5, arrival_s=float(2 * index)) for index in range(5))
    trace = Trace(Path("t.csv"), rows, 5, 0, 0, 0.0)
    plan = replace(
        PLAN,
        source=lambda number: fit(shapes.from_trace(trace, scale=1.0)[:number], CAPS),
        process=Process.TRACE,
        num_requests=None,
        time_scale=0.5,
    )
    assert [each.arrival_s for each in plan.requests(Point(), 0)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert plan.requests(Point(rate=1.0), 0)[-1].arrival_s == pytest.approx(5.0)
    cut = replace(plan, duration_s=2.5)
    assert len(cut.requests(Point(), 0)) == 3


def test_what_cannot_be_scheduled_is_refused() -> None:
    with pytest.raises(PlanError, match="no arrivals of its own"):
        replace(PLAN, process=Process.TRACE).requests(Point(), 0)
    with pytest.raises(PlanError, match="poisson arrivals need a rate"):
        PLAN.requests(Point(), 0)


def test_warmups_are_short_and_share_no_prompt_with_a_run() -> None:
    warmups = PLAN.warmups(3)
    assert len(warmups) == 3
    assert all(each.num_output <= WARMUP_OUTPUT_TOKENS for each in warmups)
    prompts = {each.prompt for each in PLAN.requests(Point(rate=1.0), 0)}
    assert not prompts & {each.prompt for each in warmups}


def test_labels() -> None:
    assert Point(rate=0.5).label == "rate 0.5"
    assert Point(concurrency=8, repeat=1).label == "concurrency 8, repeat 1"
    assert Point().label == "trace times"
