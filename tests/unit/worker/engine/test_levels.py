"""Three levels: first chunks in time, long requests yield and come back, bands count, nobody overtakes without end."""

from __future__ import annotations

from itertools import count

import pytest

from common.types import Band
from tests.unit.worker.engine.rig import SESSION, EngineRig
from worker.engine.batch import Batch
from worker.engine.cost_model import chunk_kv_tokens

PROMPT = [7, 8, 9]


def last_batch(rig: EngineRig) -> dict[str, int]:
    return dict(rig.executor.batches[-1])


def running(rig: EngineRig) -> list[str]:
    return [request.request_id for request in rig.scheduler.running]


def rig_of_long(
    bands: list[Band] | None = None, *, steps: int = 12, max_tokens: int = 60, **options: object
) -> EngineRig:
    """A full house of requests that have decoded for longer than they may without yielding."""
    bands = bands or [Band.NORMAL, Band.NORMAL]
    bounds = {"long_after_steps": 8, "num_blocks": 100, "max_num_seqs": len(bands), "grace_steps": 4} | options
    rig = EngineRig(**bounds)  # type: ignore[arg-type]
    for index, band in enumerate(bands):
        rig.submit(f"long{index}", [index, *PROMPT], max_tokens, band=band)
        rig.step()
    for _ in range(steps):
        rig.step()
    return rig


# First chunks


def test_everybody_waiting_gets_a_small_first_chunk_before_anybody_gets_a_large_one() -> None:
    rig = EngineRig(num_blocks=200, max_num_seqs=8, budget=70, max_chunk=70, min_chunk_tokens=32)
    for index in range(4):
        rig.submit(f"r{index}", [index] * 60, 2)
    rig.step()
    assert last_batch(rig) == {"r0": 17 + 2, "r1": 17, "r2": 17, "r3": 17}


def test_first_chunks_are_not_cut_below_half_of_the_minimum_and_the_rest_wait_a_step() -> None:
    rig = EngineRig(num_blocks=200, max_num_seqs=8, budget=40, max_chunk=40, min_chunk_tokens=32)
    for index in range(4):
        rig.submit(f"r{index}", [index] * 60, 2)
    rig.step()
    assert last_batch(rig) == {"r0": 16, "r1": 16, "r2": 8}
    rig.step()
    assert last_batch(rig) == {"r3": 32, "r0": 8}, "before the further chunks of those that came first"


def test_a_long_prompt_does_not_keep_a_short_one_from_its_end() -> None:
    rig = EngineRig(num_blocks=200, max_num_seqs=8, budget=60, max_chunk=60, min_chunk_tokens=32)
    rig.submit("long", [1] * 300, 2)
    rig.step()
    rig.submit("short", [2] * 40, 2)
    rig.step()
    assert last_batch(rig) == {"short": 32, "long": 28}
    rig.step()
    assert last_batch(rig) == {"long": 52, "short": 8}


def test_the_wait_for_the_first_chunk_is_told_once_for_each_request() -> None:
    rig = EngineRig(max_num_seqs=1, max_chunk=2)
    rig.submit("first", PROMPT, 1)
    rig.submit("second", PROMPT, 1)
    rig.cost_s = lambda batch: 0.25
    rig.run()
    assert [stats.first_chunk_waits_s for stats in rig.stats] == [(0.0,), (), (0.5,), ()]


# A step's length


def cost_s(batch: Batch) -> float:
    kv_tokens = sum(chunk_kv_tokens(row.request.num_computed, row.num_new) for row in batch.rows)
    return 0.01 + 4e-4 * batch.num_tokens + 1e-7 * kv_tokens + 1e-4 * len(batch.rows)


@pytest.mark.parametrize(("fixed_s", "longest_s"), [(0.004, 0.05), (0.01, 0.08), (0.03, 0.1)])
def test_no_gap_between_tokens_grows_while_a_prompt_of_thousands_of_tokens_is_computed(
    fixed_s: float, longest_s: float
) -> None:
    """Steps keep to the budget, and where each costs much whatever it computes, to the time of a first chunk."""
    rig = EngineRig(
        num_blocks=600,
        block_size=16,
        max_num_seqs=8,
        budget=512,
        max_chunk=512,
        context_length=9000,
        prefix_cache=False,
    )
    rig.cost_s = lambda batch: cost_s(batch) - 0.01 + fixed_s
    for index in range(4):
        rig.submit(f"chat{index}", [index], 300)
    for _ in range(20):
        rig.step()
    rig.submit("huge", [5] * 3000, 2)
    gaps = []
    while not rig.of("huge").is_ended:
        before = rig.now_s
        stats = rig.step()
        gaps.append(rig.now_s - before)
        assert stats.num_decodes >= 4, "decodes ride in every step"
    assert max(gaps[5:]) <= longest_s * 1.02
    assert sum(gap > 0.9 * longest_s for gap in gaps) > 0.8 * len(gaps), "and the budget is used"


def test_newcomers_start_within_their_time_while_a_huge_prompt_is_computed() -> None:
    rig = EngineRig(num_blocks=600, block_size=16, max_num_seqs=16, budget=512, max_chunk=512, context_length=9000)
    rig.cost_s = cost_s
    rig.submit("huge", [5] * 4000, 2)
    for index in range(40):
        rig.step()
        rig.submit(f"r{index}", [index] * 40, 3)
    rig.run()
    waits = [wait for stats in rig.stats for wait in stats.first_chunk_waits_s]
    assert len(waits) == 41
    assert max(waits[10:]) <= 0.1, "the first ones come before any step was measured"


# Long requests yield


def test_a_long_request_yields_its_slot_when_a_newcomer_would_be_late_and_not_before() -> None:
    rig = rig_of_long()
    rig.submit("new", [50, *PROMPT], 4)
    rig.step()
    assert running(rig) == ["long0", "long1"], "there is time yet"
    rig.now_s += 0.06
    stats = rig.step()
    assert running(rig) == ["long1", "new"], "the longest-running one made way"
    assert last_batch(rig) == {"long1": 1, "new": 4}, "and is not computed in the same step"
    assert (stats.num_yielded, stats.num_preemptions, stats.num_long_decodes, stats.num_decodes) == (1, 1, 1, 0)
    rig.run()
    for index in range(2):
        rig.assert_generated(f"long{index}", [index, *PROMPT], 60)
    rig.assert_generated("new", [50, *PROMPT], 4)


def test_requests_that_have_not_run_for_long_do_not_yield() -> None:
    rig = rig_of_long(steps=3)
    rig.submit("new", PROMPT, 4)
    rig.now_s += 10
    rig.step()
    assert running(rig) == ["long0", "long1"]


def test_without_levels_nobody_yields() -> None:
    rig = rig_of_long(mode="paged")
    rig.submit("new", PROMPT, 4)
    rig.now_s += 10
    rig.step()
    assert running(rig) == ["long0", "long1"]


@pytest.mark.parametrize(
    ("bands", "newcomer", "stays"),
    [
        ([Band.NORMAL, Band.LOW], Band.NORMAL, "long0"),  # though it has run longer
        ([Band.LOW, Band.NORMAL], Band.NORMAL, "long1"),
        ([Band.HIGH, Band.NORMAL], Band.NORMAL, "long0"),
        ([Band.NORMAL, Band.HIGH], Band.LOW, None),  # nobody yields to a lower band
        ([Band.HIGH, Band.HIGH], Band.NORMAL, None),
        ([Band.HIGH, Band.HIGH], Band.HIGH, "long1"),
    ],
)
def test_a_lower_band_yields_first_and_nobody_to_a_lower_band(
    bands: list[Band], newcomer: Band, stays: str | None
) -> None:
    rig = rig_of_long(bands)
    rig.submit("new", PROMPT, 4, band=newcomer)
    rig.now_s += 10
    rig.step()
    assert running(rig) == (["long0", "long1"] if stays is None else [stays, "new"])


def test_who_yielded_takes_the_next_free_slot_before_later_arrivals() -> None:
    rig = rig_of_long()
    rig.submit("new", PROMPT, 2)
    rig.now_s += 1
    rig.step()
    rig.submit("later", [60, *PROMPT], 2)
    rig.step()  # the last token of "new"
    rig.step()
    assert running(rig) == ["long0", "long1"], "the later one has time yet, and it is long0's turn"


def test_who_was_resumed_is_spared_for_a_while_and_no_one_yields_more_often_than_allowed() -> None:
    rig = rig_of_long(max_tokens=150, max_preemptions=2, grace_steps=20, max_thrash=1.0)
    names = count()
    for _ in range(600):
        if not any(request.started_s is None for request in rig.scheduler.waiting) and rig.engine.num_requests < 8:
            rig.submit(f"short{next(names)}", PROMPT, 6)
        rig.now_s += 0.1
        rig.step()
        assert all(
            rig.scheduler.num_steps - request.entry_step >= 20 or request.num_preemptions == 1
            for request in rig.scheduler.step.preempted
        )
        if all(rig.of(f"long{index}").is_ended for index in range(2)):
            break
    assert sum(stats.num_yielded for stats in rig.stats) == 4, "twice each"
    for index in range(2):
        rig.assert_generated(f"long{index}", [index, *PROMPT], 150)


def test_long_requests_give_blocks_to_a_newcomer_and_no_more_of_them_than_needed() -> None:
    rig = rig_of_long([Band.NORMAL] * 3, num_blocks=15, max_tokens=40)
    assert rig.pool.num_free <= 3
    rig.abort("long2")  # a slot, but not enough blocks
    rig.submit("new", [50] * 28, 4)
    rig.now_s += 1
    rig.step()
    assert running(rig) == ["long1", "new"]
    rig.run()
    rig.assert_generated("new", [50] * 28, 4)
    rig.assert_generated("long0", [0, *PROMPT], 40)


def test_nobody_yields_in_vain() -> None:
    rig = rig_of_long([Band.NORMAL, Band.HIGH], num_blocks=16, max_tokens=50)
    rig.submit("new", [50] * 48, 4)
    rig.now_s += 1
    rig.step()
    assert running(rig) == ["long0", "long1"], "its blocks and the free ones would not be enough"
    rig.run()
    rig.assert_generated("new", [50] * 48, 4)


def test_slots_that_would_be_made_free_are_told_to_gateways() -> None:
    rig = rig_of_long([Band.NORMAL, Band.NORMAL, Band.HIGH])
    assert rig.usage[SESSION].free_slots == 2, "nobody knows that the next one is of the high band"
    rig.submit("new", PROMPT, 4)
    rig.now_s += 1
    rig.step()
    assert (rig.usage[SESSION].free_slots, rig.usage[SESSION].waiting) == (0, 1)


def test_too_much_work_done_twice_stops_the_yielding() -> None:
    rig = rig_of_long(max_thrash=0.2)
    rig.scheduler.memory.thrash.observe(0, 10_000)
    rig.submit("new", PROMPT, 4)
    rig.now_s += 1
    stats = rig.step()
    assert stats.thrash_ratio > 0.2
    assert running(rig) == ["long0", "long1"]


# Overtaking


def test_small_requests_overtake_one_that_waits_for_memory_a_bounded_number_of_times() -> None:
    rig = EngineRig(num_blocks=20, max_num_seqs=4, max_overtakes=3, context_length=200)
    rig.submit("holder", [1] * 40, 30)
    rig.step()
    rig.submit("big", [2] * 60, 2)
    for index in range(6):
        rig.submit(f"small{index}", [10 + index] * 3, 2)
    rig.run()
    order = list(dict.fromkeys(name for batch in rig.executor.batches for name, _ in batch))
    assert order == ["holder", "small0", "small1", "small2", "big", "small3", "small4", "small5"]
    assert sum(stats.num_overtakes for stats in rig.stats) == 3
    for name, prompt, num_tokens in (("holder", [1] * 40, 30), ("big", [2] * 60, 2)):
        rig.assert_generated(name, prompt, num_tokens)


def test_nobody_overtakes_who_would_stay_longer_than_the_memory_is_waited_for() -> None:
    rig = EngineRig(num_blocks=20, max_num_seqs=4, output_share=1.0, context_length=200)
    rig.submit("holder", [1] * 40, 8)
    rig.step()
    rig.submit("big", [2] * 60, 2)
    rig.submit("slow", [3], 30)
    rig.submit("quick", [4], 2)
    rig.run()
    order = list(dict.fromkeys(name for batch in rig.executor.batches for name, _ in batch))
    assert order == ["holder", "quick", "big", "slow"]


# Looking ahead


@pytest.mark.parametrize(("output_share", "together"), [(1.0, False), (0.2, True)])
def test_who_would_run_out_of_memory_later_is_admitted_later(output_share: float, together: bool) -> None:
    rig = EngineRig(num_blocks=16, max_num_seqs=2, output_share=output_share)
    for index in range(2):
        rig.submit(f"r{index}", [index] * 8, 40)
    rig.step()
    assert (len(rig.scheduler.running) == 2) is together
    rig.run()
    assert (sum(stats.num_preemptions for stats in rig.stats) > 0) is together
    for index in range(2):
        rig.assert_generated(f"r{index}", [index] * 8, 40)


def test_requests_that_end_before_others_grow_are_admitted_though_the_sum_would_not_fit() -> None:
    rig = EngineRig(num_blocks=16, max_num_seqs=2, output_share=1.0)
    rig.submit("slow", [1] * 8, 50)  # 58 of 64 tokens in the end
    rig.submit("quick", [2] * 16, 8)
    rig.step()
    assert running(rig) == ["slow", "quick"]
    rig.run()
    assert not any(stats.num_preemptions for stats in rig.stats)
    rig.assert_generated("slow", [1] * 8, 50)


def test_two_that_need_more_than_half_of_the_memory_each_both_end() -> None:
    rig = EngineRig(num_blocks=12, max_num_seqs=2, long_after_steps=4, grace_steps=2, context_length=200)
    for index in range(2):
        rig.submit(f"r{index}", [index] * 4, 40)
    rig.run(max_steps=400)
    for index in range(2):
        rig.assert_generated(f"r{index}", [index] * 4, 40)
    assert sum(stats.num_preemptions for stats in rig.stats) <= 10


def test_work_done_twice_makes_admission_plan_for_all_that_was_asked_for() -> None:
    rig = EngineRig(num_blocks=16, max_num_seqs=2, output_share=0.2, max_thrash=0.2)
    rig.scheduler.memory.thrash.observe(10_000, 10_000)
    for index in range(2):
        rig.submit(f"r{index}", [index] * 8, 40)
    rig.step()
    assert running(rig) == ["r0"], "without it both enter, and one is preempted later"
    rig.run()
    rig.assert_generated("r1", [1] * 8, 40)


def test_the_longest_wait_of_a_flooded_long_request_is_half_of_its_run() -> None:
    """Short requests that would take every slot for ever: every long one is done in less than twice its own time."""
    rig = EngineRig(num_blocks=400, max_num_seqs=4, long_after_steps=16, max_thrash=9.0, context_length=1000)
    for index in range(4):
        rig.submit(f"long{index}", [index, *PROMPT], 300)
    names, ended = count(), dict[str, int]()
    for step in range(1, 700):
        while rig.engine.num_requests < 12:
            name = next(names)
            rig.submit(f"short{name}", [50 + name % 40, *PROMPT], 10)
        rig.now_s += 0.1
        rig.step()
        for index in range(4):
            if rig.of(f"long{index}").is_ended:
                ended.setdefault(f"long{index}", step)
    assert len(ended) == 4
    assert max(ended.values()) <= 2 * 300
    assert sum(record.is_ended for name, record in rig.records.items() if name[1].startswith("short")) > 100
