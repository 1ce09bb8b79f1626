"""What the measurement of the levels counts, in simulated time."""

from __future__ import annotations

from bench.levels import FIRST_CHUNK_S, Arrival, Log, Run, SimulatedMachine, poisson, unlike
from bench.workload import Work, mixed


def test_first_chunks_of_the_mixed_load_start_in_time_and_gaps_stay_below_it() -> None:
    arrivals = poisson(mixed(40, scale=0.5), rate=1.5)
    log = Run(SimulatedMachine(4096), "full").serve(arrivals)
    assert len(log.waits_s) == 40
    assert log.share_in_time == 1.0
    assert max(log.gaps_s([each.name for each in arrivals])) <= 1.05 * FIRST_CHUNK_S


def test_who_was_not_served_in_time_counts_as_late() -> None:
    arrivals = [Arrival(0.0, f"r{index}", Work(unlike(index, 20), 400)) for index in range(4)]
    log = Run(SimulatedMachine(4096), "paged", max_num_seqs=3).serve(arrivals, is_over=lambda log, at_s: at_s >= 2)
    assert 2 <= log.seconds < 2.2
    assert len(log.first_chunk_waits_s) == 3
    assert log.unstarted_waits_s == [log.seconds]
    assert log.share_in_time == 3 / 4


def test_requests_come_when_fewer_are_in_flight() -> None:
    arrivals = [Arrival(0.0, f"r{index}", Work(unlike(index, 20), 5)) for index in range(6)]
    log = Run(SimulatedMachine(4096), "full").serve(arrivals, in_flight=2)
    ends = sorted(times[-1] for times in log.token_at_s.values())
    starts = sorted(times[0] for times in log.token_at_s.values())
    assert all(start > end for start, end in zip(starts[2:], ends, strict=False)), "the third after the first ended"
    assert log.share_in_time == 1.0, "each is counted from when it came"


def test_gaps_are_those_between_tokens_of_one_request_in_a_stretch_of_time() -> None:
    log = Log()
    log.token_at_s["a"] += [1.0, 2.0, 4.0, 8.0]
    log.token_at_s["b"] += [2.5]
    assert log.gaps_s(["a", "b"], 1.5, 5.0) == [2.0]


def test_bounds_in_time_cost_little_where_prompts_are_most_of_the_work() -> None:
    work = [Arrival(0.0, f"r{index}", Work(unlike(index, 600), 20)) for index in range(16)]
    seconds = {mode: Run(SimulatedMachine(4096), mode).serve(work).seconds for mode in ("paged", "full")}
    assert seconds["full"] <= 1.25 * seconds["paged"]
