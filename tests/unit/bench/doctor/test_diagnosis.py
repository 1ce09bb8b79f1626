"""The judgement at its borders, over facts and snapshots that are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.doctor.diagnosis import Cause, judge
from bench.doctor.facts import Bounds, Facts, FactsError, derive
from bench.doctor.snapshot import Reading, Snapshot

BOUNDS = Bounds(max_num_seqs=10, max_num_batched_tokens=100, step_budget_s=0.05, first_chunk_s=0.1)
BUSY = Facts(
    interval_s=10.0,
    busy_share=0.95,
    steps_per_s=20.0,
    step_s=0.04,
    rows_per_step=5.0,
    tokens_per_step=50.0,
    chunk_share=0.3,
    num_chunks=40.0,
    further_share=0.8,
    tokens_per_chunk=75.0,
    first_chunk_wait_s=0.05,
    referenced_share=0.5,
    running=5.0,
    waiting=0.0,
    queued=3.0,
    queue_wait_s=0.5,
    num_preempted=0.0,
    num_overtakes=0.0,
    num_requests=40.0,
    limited={},
)
"""Busy, and nothing is full or late."""


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.COMPUTE),
        ({"busy_share": 0.5, "queued": 0.0}, Cause.IDLE),
        ({"rows_per_step": 9.8}, Cause.SLOTS),
        ({"rows_per_step": 9.8, "queued": 0.0}, Cause.SLOTS),  # the queue's waits tell
        ({"rows_per_step": 9.8, "queued": 0.0, "queue_wait_s": 0.0}, Cause.COMPUTE),
        ({"rows_per_step": 9.8, "step_s": 0.06}, Cause.COMPUTE),
        ({"rows_per_step": 9.8, "referenced_share": 0.9}, Cause.MEMORY),
        ({"rows_per_step": 9.8, "num_preempted": 1.0}, Cause.SLOTS),
        ({"referenced_share": 0.85}, Cause.MEMORY),
        ({"num_preempted": 4.0}, Cause.MEMORY),
        ({"num_overtakes": 4.0}, Cause.MEMORY),
        ({"tokens_per_step": 98.0}, Cause.PREFILL),
        ({"tokens_per_step": 98.0, "step_s": 0.05}, Cause.COMPUTE),
        ({"tokens_per_step": 98.0, "num_chunks": 0.0}, Cause.COMPUTE),
        ({"first_chunk_wait_s": 0.5}, Cause.PREFILL),
        ({"first_chunk_wait_s": 0.5, "chunk_share": 0.7}, Cause.COMPUTE),
        ({"tokens_per_chunk": 3.0}, Cause.PREFILL),
        ({"tokens_per_chunk": 3.0, "further_share": 0.2}, Cause.COMPUTE),  # the prompts are short, not cut up
        ({"busy_share": 0.5, "limited": {"TOKEN_RATE": 20.0}}, Cause.RATE_LIMIT),
        ({"busy_share": 0.5, "limited": {"TOKEN_RATE": 1.0}}, Cause.IDLE),
        ({"limited": {"TOKEN_RATE": 20.0}}, Cause.COMPUTE),
    ],
)
def test_one_figure_decides(changes: dict[str, Any], cause: Cause) -> None:
    assert judge(replace(BUSY, **changes), BOUNDS).found.cause is cause


def test_the_step_budget_is_named_where_decodes_take_the_time() -> None:
    late = replace(BUSY, first_chunk_wait_s=0.5, step_s=0.06)
    assert "step_budget_ms above 60" in judge(late, BOUNDS).found.change


def test_an_idle_device_with_a_queue_is_not_told_to_get_more_load() -> None:
    found = judge(replace(BUSY, busy_share=0.5), BOUNDS).found
    assert found.cause is Cause.IDLE
    assert "requests wait" in found.change


share = st.floats(0, 1)
amount = st.floats(0, 1000)


@settings(max_examples=200)
@given(
    st.builds(
        Facts,
        interval_s=st.floats(0.1, 100),
        busy_share=share,
        steps_per_s=amount,
        step_s=share,
        rows_per_step=st.floats(0, 10),
        tokens_per_step=st.floats(0, 100),
        chunk_share=share,
        num_chunks=amount,
        further_share=share,
        tokens_per_chunk=st.floats(0, 100),
        first_chunk_wait_s=share,
        referenced_share=share,
        running=amount,
        waiting=amount,
        queued=amount,
        queue_wait_s=share,
        num_preempted=amount,
        num_overtakes=amount,
        num_requests=amount,
        limited=st.dictionaries(st.sampled_from(["REQUEST_RATE", "CONCURRENCY"]), st.floats(1, 100)),
    )
)
def test_there_is_always_one_diagnosis_and_idle_devices_have_no_other_bottleneck(facts: Facts) -> None:
    diagnosis = judge(facts, BOUNDS)
    assert [answer.cause for answer in diagnosis.answers] == list(Cause)
    assert diagnosis.found.figures
    assert diagnosis.found.change
    is_unused = diagnosis.found.cause in (Cause.IDLE, Cause.RATE_LIMIT)
    assert is_unused == (facts.busy_share < 0.8)


def reading(**values: float) -> Reading:
    return Reading.parse("".join(f"{name} {value}\n" for name, value in values.items()))


def snapshot(at_s: float, *workers: Reading) -> Snapshot:
    return Snapshot(at_s, workers, ())


def test_figures_are_of_the_interval_alone_and_of_all_workers() -> None:
    names = ("tidegate_worker_step_seconds_sum", "tidegate_worker_step_seconds_count", "tidegate_worker_batch_size_sum")
    first, second = (dict.fromkeys(names, 100.0) for _ in range(2))
    before = snapshot(50.0, reading(**first), reading(**second))
    later = dict(zip(names, (106.0, 300.0, 900.0), strict=True))
    after = snapshot(60.0, reading(**later), reading(**second))
    facts = derive(before, after)
    assert facts.busy_share == pytest.approx(0.3), "6 of 2 x 10 seconds"
    assert facts.step_s == pytest.approx(0.03)
    assert facts.rows_per_step == pytest.approx(4.0)


def test_bounds_are_what_the_workers_tell() -> None:
    names = ("max_num_seqs", "max_num_batched_tokens", "step_budget_seconds", "first_chunk_seconds")
    told = {f"tidegate_worker_{name}": value for name, value in zip(names, (32, 512, 0.05, 0.1), strict=True)}
    larger = told | {"tidegate_worker_max_num_seqs": 64}
    assert Bounds.of(snapshot(1.0, reading(**told))) == Bounds(32, 512, 0.05, 0.1)
    assert Bounds.of(snapshot(1.0, reading(**told), reading(**larger))).max_num_seqs == 48
    del larger["tidegate_worker_step_budget_seconds"]
    with pytest.raises(FactsError, match="does not tell its step_budget_seconds"):
        Bounds.of(snapshot(1.0, reading(**told), reading(**larger)))


def test_snapshots_that_do_not_belong_together_are_refused() -> None:
    one = reading(tidegate_worker_preemptions_total=5)
    with pytest.raises(FactsError, match="before the first"):
        derive(snapshot(2.0, one), snapshot(1.0, one))
    with pytest.raises(FactsError, match="at least one"):
        derive(snapshot(1.0), snapshot(2.0))
    with pytest.raises(FactsError, match="different deployments"):
        derive(snapshot(1.0, one), snapshot(2.0, one, one))
    with pytest.raises(FactsError, match="restarted"):
        derive(snapshot(1.0, one), snapshot(2.0, reading(tidegate_worker_preemptions_total=1)))
