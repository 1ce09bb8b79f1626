"""The search finds what is fastest within the limits, and says so where nothing is."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from bench.levels import SimulatedMachine
from bench.modes.trial import Server, Setting, Times, Trial
from bench.modes.workloads import mix
from bench.tune import Candidate, Grid, Measured, Target, advice, closest, curve, drift, figures, recommend, search
from common.types import ModelLimits

GRID = Grid()


def model(candidate: Candidate) -> Measured:
    """More slots make more tokens and longer gaps; a small budget makes long TTFT; blocks of 32 are a bit faster."""
    size, budget = candidate.max_num_seqs, candidate.max_num_batched_tokens
    gap_ms = 10 + 2 * size + budget / 100
    rate = 1000 * size / gap_ms * (1.1 if candidate.block_size == 32 else 1.0)
    return Measured(candidate, rate, 20 + 20_000 / budget, gap_ms)


def test_slots_grow_until_a_limit_is_broken() -> None:
    target = Target(1000, 60)
    tried = list(search(model, target, GRID, 16))
    assert [each.candidate.max_num_seqs for each in tried[:6]] == [1, 2, 4, 8, 16, 32]
    assert not tried[5].meets(target)
    best = recommend(tried, target)
    assert best is not None
    assert best.candidate == Candidate(16, 64, 32), "then the budget, then the block size, each at the best before"
    assert all(each.output_rate <= best.output_rate for each in tried if each.meets(target))


def test_a_ttft_limit_asks_for_a_larger_budget() -> None:
    target = Target(130, 60)
    best = recommend(list(search(model, target, GRID, 16)), target)
    assert best is not None
    assert best.candidate.max_num_batched_tokens == 256
    assert best.meets(target)


def test_slots_that_gain_nothing_end_the_search() -> None:
    def flat(candidate: Candidate) -> Measured:
        return Measured(candidate, 100.0, 1.0, 1.0)

    tried = list(search(flat, Target(10, 10), GRID, 16))
    assert [each.candidate.max_num_seqs for each in tried[:2]] == [1, 2]
    assert {each.candidate.max_num_seqs for each in tried[2:]} == {1}
    assert recommend(tried, Target(10, 10)) == tried[0], "as fast, but for noise, is no reason to move"


def test_a_budget_below_the_slots_is_not_tried() -> None:
    grid = Grid(sizes=(128,), budgets=(64, 128, 512))
    tried = list(search(model, Target(1e6, 1e6), grid, 16))
    assert [each.candidate.max_num_batched_tokens for each in tried[:2]] == [512, 128]


def test_limits_that_nothing_keeps() -> None:
    target = Target(1000, 5)
    tried = list(search(model, target, GRID, 16))
    assert recommend(tried, target) is None
    assert tried[0] == model(Candidate(1, 512, 16))
    assert {each.candidate.max_num_seqs for each in tried} == {1}, "more slots would only be slower"
    nearest = closest(tried, target)
    assert nearest.candidate.max_num_batched_tokens == 64
    assert f"{nearest.p99_tpot_ms / 5:.2f} times as long" in advice(tried, target)


def test_the_advice_can_be_pasted_and_the_curve_marks_what_counts() -> None:
    target = Target(1000, 60)
    tried = list(search(model, target, GRID, 16))
    assert (
        "TIDEGATE_WORKER_MAX_NUM_SEQS=16 TIDEGATE_WORKER_MAX_NUM_BATCHED_TOKENS=64 TIDEGATE_WORKER_BLOCK_SIZE=32"
        in advice(tried, target)
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(curve(tried, target))
    lines = console.export_text().splitlines()
    assert sum(line.lstrip().startswith("* ") for line in lines) == 1
    assert sum("!" in line for line in lines[1:-1]) == sum(not each.meets(target) for each in tried)


def test_the_wave_of_the_start_and_the_ebb_of_the_end_do_not_count() -> None:
    times = [
        Times(0.0, False, [9.0, 9.5], 9.5),
        Times(0.0, False, [9.0, 10.0], 10.0),
        Times(9.5, False, [9.6, 9.8], 9.8),
        Times(10.0, False, [10.2, 10.4], 10.4),
    ]
    trial = Trial("made", Setting("full", 2), None, seconds=11.0, times=times)
    measured = figures(Candidate(2, 512, 16), trial)
    assert measured.output_rate == pytest.approx(6 / 10), "until the last request was sent"
    assert measured.p99_ttft_ms == pytest.approx(200, rel=0.02)
    assert measured.p99_tpot_ms == pytest.approx(200)


@pytest.mark.parametrize("mode", ["full", "client"])
def test_so_many_users_are_at_work_until_the_work_is_over(mode: str) -> None:
    work = mix("short only", 16, seed=0, vocab_size=40_000)
    limits = ModelLimits("simulated", 8192, 40_000, 16, 511, 4)
    machine = SimulatedMachine(512)
    trial = Server(machine, replace(Setting(mode, 4)), work, limits).serve_users(4)
    assert [len(times.token_s) for times in trial.times] == [job.num_output for job in work.jobs]
    starts = sorted(times.scheduled_s for times in trial.times)
    ends = sorted(times.end_s or 0.0 for times in trial.times)
    assert starts[:4] == [0.0] * 4
    assert starts[4:] == ends[:12], "each end makes room for the next"
    assert trial.seconds == ends[-1]


def test_a_machine_that_became_faster_or_slower_is_noticed() -> None:
    first = model(Candidate(4, 512, 16))
    faster = replace(first, output_rate=1.25 * first.output_rate)
    assert drift(first, first) == 0
    assert drift(first, faster) == drift(faster, first) == pytest.approx(0.25)
