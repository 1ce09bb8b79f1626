"""The scheduler: who rides in a step, who waits, who is preempted, and that everybody gets done."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from common.types import Band
from tests.unit.worker.engine.rig import EngineRig
from worker.cache.block import Block
from worker.engine.scheduler import SchedulerConfig


def long_prompt(index: int, length: int) -> list[int]:
    return [80 * index + position % 80 for position in range(length)]


# Bounds of a step


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ((0, 8, 8), "max_num_seqs is 0"),
        ((1, 0, 8), "max_num_batched_tokens is 0"),
        ((1, 8, 0), "max_chunk_tokens is 0"),
        ((1, 8, 8, -1), "watermark_blocks is -1"),
        ((9, 8, 8), "at least max_num_seqs = 9"),
    ],
)
def test_bounds_without_progress_stop_the_start(config: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(*config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("min_chunk_tokens", 0, "min_chunk_tokens is 0, at least 1"),
        ("long_after_steps", -1, "long_after_steps is -1, at least 0"),
        ("grace_steps", -1, "grace_steps is -1"),
        ("step_budget_s", 0.0, "step_budget_s is 0.0, more than 0"),
        ("max_thrash", 0.0, "max_thrash is 0.0"),
        ("optimism", 1.5, "optimism is 1.5, allowed are 0 to 1"),
        ("output_share", -0.1, "output_share is -0.1"),
    ],
)
def test_policies_that_mean_nothing_stop_the_start(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(1, 8, 8, **{field: value})  # type: ignore[arg-type]


def test_decodes_ride_in_every_step_then_first_chunks_then_further_ones() -> None:
    rig = EngineRig(num_blocks=200, max_num_seqs=8, budget=20, max_chunk=8)
    rig.submit("decode", [1, 2], 50)
    rig.step()
    rig.submit("long", long_prompt(1, 60), 2)
    rig.step()
    assert rig.executor.batches[-1] == [("decode", 1), ("long", 8)]
    rig.submit("new1", long_prompt(2, 7), 2)
    rig.submit("new2", long_prompt(3, 7), 2)
    rig.step()
    assert rig.executor.batches[-1] == [("decode", 1), ("new1", 7), ("new2", 7), ("long", 5)]
    rig.run()
    assert all("decode" in dict(batch) for batch in rig.executor.batches[:50])


def test_no_step_computes_more_than_its_budget_and_every_row_advances() -> None:
    rig = EngineRig(num_blocks=200, max_num_seqs=6, budget=10, max_chunk=7)
    for index in range(12):
        rig.submit(f"r{index}", long_prompt(index, 3 + 4 * index), 9)
    rig.run()
    for batch in rig.executor.batches:
        assert sum(num_new for _, num_new in batch) <= 10
        assert all(1 <= num_new <= 7 for _, num_new in batch)
    for index in range(12):
        rig.assert_generated(f"r{index}", long_prompt(index, 3 + 4 * index), 9)


def test_with_every_slot_taken_the_smallest_budget_still_advances_a_prompt() -> None:
    rig = EngineRig(num_blocks=100, max_num_seqs=3, budget=3, max_chunk=16)
    rig.submit("a", [1], 30)
    rig.submit("b", [2], 30)
    rig.submit("prompt", long_prompt(1, 20), 2)
    rig.run()
    rig.assert_generated("prompt", long_prompt(1, 20), 2)


def test_decode_goes_on_while_many_prompts_come_in() -> None:
    rig = EngineRig(num_blocks=400, max_num_seqs=8, budget=16, max_chunk=8)
    rig.submit("decode", [1, 2], 60)
    names = count()
    for _ in range(60):
        if rig.engine.num_requests < 12:
            rig.submit(f"r{next(names)}", long_prompt(next(names) % 9, 30), 2)
        rig.step()
    assert len(rig.of("decode").token_ids) == 60, "a token in each step"


def test_several_long_prompts_that_do_not_fit_together_do_not_hold_and_wait() -> None:
    rig = EngineRig(num_blocks=20, max_chunk=4)  # each takes 12 blocks
    for index in range(4):
        rig.submit(f"r{index}", long_prompt(index, 45), 3)
    rig.run()
    assert not any(stats.num_preemptions for stats in rig.stats)
    for index in range(4):
        rig.assert_generated(f"r{index}", long_prompt(index, 45), 3)


def test_a_watermark_larger_than_the_pool_does_not_stop_a_lone_request() -> None:
    rig = EngineRig(num_blocks=8, watermark_blocks=100)
    rig.submit("a", [1] * 10, 4)
    rig.submit("b", [2] * 10, 4)
    rig.run()
    rig.assert_generated("a", [1] * 10, 4)
    rig.assert_generated("b", [2] * 10, 4)


def test_a_request_that_would_block_everybody_for_ever_is_not_taken() -> None:
    rig = EngineRig(num_blocks=8)
    rig.submit("r", [1] * 10)
    request = rig.scheduler.waiting.first(1)[0]
    request.token_ids = [1] * 33
    with pytest.raises(ValueError, match="can never fit into 8 blocks"):
        rig.scheduler.add(request)


# Order


def test_first_chunks_come_by_arrival() -> None:
    rig = EngineRig(max_num_seqs=2, budget=8, max_chunk=8)
    for index in range(6):
        rig.submit(f"r{index}", [index] * 8, 2)
    rig.run()
    first_seen = list(dict.fromkeys(name for batch in rig.executor.batches for name, _ in batch))
    assert first_seen == [f"r{index}" for index in range(6)]


def test_a_preempted_request_returns_before_later_arrivals() -> None:
    rig = EngineRig(num_blocks=8, max_num_seqs=3, max_overtakes=0)
    rig.submit("first", [1] * 10, 16)
    rig.submit("victim", [2] * 10, 16)
    while not rig.scheduler.waiting.num_returning:
        rig.step()
    rig.submit("new", [3] * 2, 2)
    rig.run()
    batches = [dict(batch) for batch in rig.executor.batches]
    first_of_new = next(index for index, batch in enumerate(batches) if "new" in batch)
    steps_of_victim = [index for index, batch in enumerate(batches) if "victim" in batch]
    returned = next(step for last, step in pairwise(steps_of_victim) if step > last + 1)
    assert returned <= first_of_new, "though the small one would have fitted all the time"
    rig.assert_generated("victim", [2] * 10, 16)


# Preemption


def preempting_rig(bands: list[Band]) -> EngineRig:
    """Three requests that grow to three blocks each, fill a pool of nine, and enter a fourth block together."""
    rig = EngineRig(num_blocks=9, max_num_seqs=3)
    for index, band in enumerate(bands):
        rig.submit(f"r{index}", [index] * 8, 12, band=band)
    while not rig.scheduler.waiting.num_returning:
        rig.step()
    return rig


@pytest.mark.parametrize(
    ("bands", "victim"),
    [
        ([Band.NORMAL, Band.NORMAL, Band.NORMAL], "r2"),
        ([Band.LOW, Band.NORMAL, Band.HIGH], "r0"),
        ([Band.HIGH, Band.LOW, Band.LOW], "r2"),
        ([Band.HIGH, Band.NORMAL, Band.HIGH], "r1"),
    ],
)
def test_the_victim_is_the_latest_arrival_of_the_lowest_band(bands: list[Band], victim: str) -> None:
    rig = preempting_rig(bands)
    assert [request.request_id for request in rig.scheduler.waiting] == [victim]
    rig.run()
    for index in range(3):
        rig.assert_generated(f"r{index}", [index] * 8, 12)
    rig.assert_idle()


def test_a_later_arrival_does_not_get_the_blocks_that_a_preemption_freed() -> None:
    rig = EngineRig(num_blocks=9, max_num_seqs=4)
    for index in range(3):
        rig.submit(f"r{index}", [index] * 8, 12)
    rig.step()
    rig.submit("new", [7], 2)
    while not rig.scheduler.waiting.num_returning:
        rig.step()
    assert "new" not in dict(rig.executor.batches[-1])
    rig.run()
    rig.assert_generated("new", [7], 2)


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("position", range(1, 17))
def test_preempting_at_any_position_changes_no_output(block_size: int, position: int) -> None:
    """Around every multiple of the block size, in mid-prompt and while decoding, with a cold and a warm cache."""
    rig = EngineRig(num_blocks=60 // block_size, block_size=block_size, max_chunk=1, max_num_seqs=2)
    prompt = list(range(9))
    rig.submit("r", prompt, 9)
    for _ in range(position):
        rig.step()
    request = rig.scheduler.running[0]
    rig.scheduler.preempt(request)
    evicted = [rig.pool.take().block_id for _ in range(rig.pool.num_free if position % 2 else 0)]
    for block_id in evicted:
        rig.pool.release(block_id)
    rig.run()
    rig.assert_generated("r", prompt, 9)
    rig.assert_idle()


@pytest.mark.parametrize("num_blocks", range(6, 14))
def test_a_crowd_in_a_tiny_pool_gets_done_without_ping_pong(num_blocks: int) -> None:
    rig = EngineRig(num_blocks=num_blocks, max_num_seqs=6)
    for index in range(8):
        rig.submit(f"r{index}", [index] * (5 + index), 10)
    rig.run()
    for index in range(8):
        rig.assert_generated(f"r{index}", [index] * (5 + index), 10)
    useful = sum(5 + index + 10 for index in range(8))
    recomputed = sum(stats.num_recomputed_tokens for stats in rig.stats)
    assert recomputed <= useful, "more is computed again than at all"
    rig.assert_idle()


def test_a_preempted_request_returns_only_when_the_others_can_enter_a_block_each() -> None:
    rig = EngineRig(num_blocks=8)
    rig.submit("stays", [1] * 12, 4)
    rig.submit("returns", [2] * 12, 4)
    rig.step()
    rig.step()  # both hold four blocks
    rig.scheduler.preempt(rig.scheduler.running[1])
    rig.step()
    assert rig.pool.num_free == 4, "as many as it needs, and none for the other"
    assert [request.request_id for request in rig.scheduler.waiting] == ["returns"]
    rig.run()
    rig.assert_generated("returns", [2] * 12, 4)


def test_recomputed_tokens_are_counted_and_a_return_from_the_cache_is_not_recomputed() -> None:
    rig = EngineRig(num_blocks=32)
    rig.submit("r", [1] * 10, 4)
    rig.step()
    rig.scheduler.preempt(rig.scheduler.running[0])
    stats = rig.step()
    assert (stats.num_hit_tokens, stats.num_recomputed_tokens) == (8, 2)


# Slots


def test_slots_are_stable_and_low_ones_come_first() -> None:
    rig = EngineRig(num_blocks=64, max_num_seqs=4)
    for index in range(3):
        rig.submit(f"r{index}", [index], 20)
    rig.step()
    before = {request.request_id: request.slot for request in rig.scheduler.running}
    assert before == {"r0": 0, "r1": 1, "r2": 2}
    rig.abort("r0")
    rig.submit("r3", [5], 20)
    rig.step()
    assert {request.request_id: request.slot for request in rig.scheduler.running} == {"r1": 1, "r2": 2, "r3": 0}


def test_every_admission_is_told_apart() -> None:
    rig = EngineRig(num_blocks=32)
    rig.submit("r", [1] * 10, 4)
    rig.step()
    request = rig.scheduler.running[0]
    assert request.admissions == 1
    rig.scheduler.preempt(request)
    assert request.slot == -1
    rig.step()
    assert request.admissions == 2


# Cost


def count_block_visits(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> int:
    """Reads of any block's links and counts during the life of the same requests in a pool of this size."""
    visits = 0
    rig = EngineRig(num_blocks=num_blocks, max_num_seqs=4)

    class Watched(Block):
        __slots__ = ()

        def __getattribute__(self, name: str) -> object:
            nonlocal visits
            visits += 1
            return super().__getattribute__(name)

    for block in rig.pool.blocks:
        block.__class__ = Watched
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "check_integrity", lambda: None)
        for index in range(6):
            rig.submit(f"r{index}", [index % 2] * 20, 12)
        rig.run()
    return visits


def test_the_cost_of_a_step_does_not_grow_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_block_visits(monkeypatch, 20_000) <= 1.1 * count_block_visits(monkeypatch, 200)
