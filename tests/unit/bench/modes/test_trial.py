"""A trial serves what the workload says, and its figures are those of the steps that were computed."""

from __future__ import annotations

import pytest

from bench.levels import STEP_S
from bench.modes.trial import Server, Setting, Trial
from tests.unit.bench.modes.made import LIMITS, machine, workload
from worker.engine.modes import MODES


def serve(lengths: list[int], setting: Setting, rate: float | None = None, num_blocks: int = 256) -> Trial:
    return Server(machine(num_blocks), setting, workload(lengths), LIMITS).serve(rate)


@pytest.mark.parametrize("mode", MODES)
def test_every_request_gets_the_tokens_that_the_workload_says(mode: str) -> None:
    trial = serve([5, 40, 1, 17, 130], Setting(mode, 2))
    assert [len(times.token_s) for times in trial.times] == [5, 40, 1, 17, 130]
    assert trial.num_output == 193
    assert [times.is_long for times in trial.times] == [False, False, False, False, True]
    assert all(times.end_s == times.token_s[-1] for times in trial.times)


def test_a_static_batch_waits_for_its_longest_and_a_continuous_one_does_not() -> None:
    lengths = [10, 100, 10, 10]
    static, continuous = serve(lengths, Setting("static", 2)), serve(lengths, Setting("continuous", 2))
    assert static.times[2].token_s[0] > static.times[1].token_s[-1]
    assert continuous.times[2].token_s[0] < continuous.times[1].token_s[-1]
    assert static.idle_share > continuous.idle_share + 0.03
    assert continuous.output_rate > static.output_rate


def test_latencies_count_from_the_scheduled_arrival() -> None:
    trial = serve([50, 50, 50], Setting("static", 1), rate=1000.0)
    assert [times.scheduled_s for times in trial.times] == [0.0, 0.001, 0.002]
    second = trial.times[1]
    assert second.ttft_s is not None
    assert second.ttft_s > 50 * STEP_S, "the wait for the batch before is part of it"
    assert second.e2e_s == pytest.approx(second.token_s[-1] - 0.001)
    assert second.tpot_s == pytest.approx((second.token_s[-1] - second.token_s[0]) / 49)


def test_time_without_requests_is_idle() -> None:
    trial = serve([1, 1, 1], Setting("full", 1), rate=0.01)
    assert trial.seconds > 200
    assert trial.no_step_share > 0.99
    assert trial.idle_share >= trial.no_step_share


def test_the_client_mode_gathers_before_it_starts() -> None:
    trial = serve([3, 3], Setting("client", 8), rate=100.0)
    first, second = trial.times
    assert first.token_s == second.token_s, "both are in one batch"
    assert first.ttft_s is not None
    assert first.ttft_s > 0.05


def test_reserved_memory_holds_fewer_tokens_than_memory_that_grows() -> None:
    lengths = [20] * 30 + [300]
    reserved = serve(lengths, Setting("continuous", 16), num_blocks=65)
    grown = serve(lengths, Setting("paged", 16), num_blocks=65)
    assert reserved.kv_stored_share < 0.5 * reserved.kv_referenced_share
    assert grown.kv_stored_share > 0.5 * grown.kv_referenced_share
    assert grown.output_rate > reserved.output_rate


@pytest.mark.parametrize("mode", MODES)
def test_shares_are_shares(mode: str) -> None:
    trial = serve([5, 60, 200, 9] * 4, Setting(mode, 8), rate=2.0)
    for share in (trial.idle_share, trial.no_step_share, trial.kv_stored_share, trial.kv_referenced_share):
        assert 0 <= share <= 1
    assert trial.kv_stored_share <= trial.kv_referenced_share
    assert trial.num_long_done_at(trial.seconds) == 4
    assert trial.num_long_done_at(0.0) == 0
