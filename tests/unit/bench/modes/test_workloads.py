"""Mixes have the lengths and shares they claim, and a trace is cut to what can be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.modes.cli import TRACE
from bench.modes.workloads import LONG, MIXES, SHORT, SYSTEM_PROMPT, mix, replayed
from bench.traces import Trace, TraceRow, load_trace

VOCAB_SIZE = 40_000


@pytest.mark.parametrize(("name", "num_long"), [("short only", 0), ("30 % long", 12)])
def test_a_mix_has_exactly_its_share_of_long_requests(name: str, num_long: int) -> None:
    made = mix(name, 40, seed=3, vocab_size=VOCAB_SIZE)
    assert made.num_long == num_long
    for job in made.jobs:
        kind = LONG if job.is_long else SHORT
        assert kind.prompt[0] <= len(job.prompt) <= kind.prompt[1]
        assert kind.output[0] <= job.num_output <= kind.output[1]
    assert made.max_tokens == max(job.num_output for job in made.jobs)
    assert made.unit_arrivals[-1] == pytest.approx(40), "one a second on average"


@pytest.mark.parametrize("name", MIXES)
def test_the_same_seed_makes_the_same_requests_and_another_one_others(name: str) -> None:
    first, again, other = (mix(name, 20, seed=seed, vocab_size=VOCAB_SIZE) for seed in (1, 1, 2))
    assert first == again
    assert first.jobs != other.jobs


def test_prompts_begin_alike_and_go_on_unlike() -> None:
    jobs = mix("short only", 20, seed=0, vocab_size=VOCAB_SIZE).jobs
    shared = SYSTEM_PROMPT[1]
    assert len({job.prompt[:shared] for job in jobs}) == 1
    assert len({job.prompt[: shared + 4] for job in jobs}) == 20


def test_a_trace_keeps_its_pattern_and_says_what_was_cut() -> None:
    rows = (TraceRow(1000, 10, 0.0), TraceRow(40, 4000, 1.0), TraceRow(40, 20, 4.0))
    trace = Trace(Path("conv.csv"), rows, 100, 7, 0, 0.0)
    made = replayed(trace, scale=0.5, max_tokens=400, seed=0, vocab_size=VOCAB_SIZE)
    assert [(len(job.prompt), job.num_output) for job in made.jobs] == [(200, 5), (20, 200), (20, 10)]
    assert made.unit_arrivals == pytest.approx((0.0, 0.75, 3.0))
    assert "rows 7:10 of 100, lengths times 0.5, 2 requests shortened to 200 tokens" in made.note


def test_the_trace_that_comes_with_the_modes_has_short_and_long_answers_and_arrivals() -> None:
    trace = load_trace(TRACE)
    made = replayed(trace, scale=0.3, max_tokens=1000, seed=0, vocab_size=VOCAB_SIZE)
    assert (len(trace.rows), trace.num_rows_in_file, trace.has_arrivals) == (60, 60, True)
    assert 0 < made.num_long < 30 < len(made.jobs)
    assert list(made.unit_arrivals) == sorted(made.unit_arrivals)


def test_a_trace_without_arrivals_gets_random_ones() -> None:
    trace = Trace(Path("lengths.csv"), (TraceRow(10, 10),) * 30, 30, 0, 0, 0.0)
    made = replayed(trace, scale=1.0, max_tokens=400, seed=0, vocab_size=VOCAB_SIZE)
    assert made.unit_arrivals[-1] == pytest.approx(30)
    assert list(made.unit_arrivals) == sorted(made.unit_arrivals)
