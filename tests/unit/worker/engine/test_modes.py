"""The five modes: the same tokens from each on the same work, and what tells them apart."""

from __future__ import annotations

import random

import pytest

from common.types import FinishReason
from tests.unit.worker.engine.rig import EngineRig
from worker.engine.modes import MODES

PROMPT = [7, 8, 9]


def entries(rig: EngineRig) -> list[str]:
    """Requests in the order of their first chunks."""
    return list(dict.fromkeys(name for batch in rig.executor.batches for name, _ in batch))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_generates_the_same_tokens_on_the_same_work(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    rig = EngineRig(mode=mode, num_blocks=24, max_num_seqs=5, long_after_steps=8, first_chunk_s=0.01, grace_steps=3)
    rig.cost_s = lambda batch: 0.001 * batch.num_tokens
    work = {
        f"r{index}": ([index, *[rng.randrange(9) for _ in range(rng.randint(1, 30))]], rng.randint(1, 30))
        for index in range(20)
    }
    for name, (prompt, num_tokens) in work.items():
        rig.submit(name, prompt, num_tokens)
        for _ in range(rng.randrange(3)):
            rig.now_s += rig.engine.pause_s
            rig.step()
    rig.abort("r3")
    rig.run()
    for name, (prompt, num_tokens) in work.items():
        if rig.of(name).finish_reason is not FinishReason.CANCELLED:
            rig.assert_generated(name, prompt, num_tokens)
    rig.assert_idle()


@pytest.mark.parametrize("mode", ["static", "client"])
def test_a_batch_enters_together_and_its_slots_and_blocks_are_held_until_the_last_has_ended(mode: str) -> None:
    rig = EngineRig(mode=mode, max_num_seqs=3, gather_count=3)
    rig.submit("a", [1, *PROMPT], 2)
    rig.submit("b", [2, *PROMPT], 9)
    rig.submit("c", [3, *PROMPT], 5)
    rig.submit("d", [4, *PROMPT], 2)
    rig.step()
    assert rig.executor.batches[0] == [("a", 4), ("b", 4), ("c", 4)]
    held = rig.pool.counts.referenced
    for _ in range(7):
        rig.step()
    assert rig.of("a").is_ended
    assert rig.of("c").is_ended
    assert (rig.pool.counts.referenced, len(rig.scheduler.running)) == (held, 1)
    assert entries(rig) == ["a", "b", "c"]
    rig.run()
    assert entries(rig) == ["a", "b", "c", "d"]
    rig.assert_idle()


def test_an_aborted_request_leaves_with_its_batch_as_well() -> None:
    rig = EngineRig(mode="static", max_num_seqs=2)
    rig.submit("a", [1, *PROMPT], 20)
    rig.submit("b", [2, *PROMPT], 20)
    rig.submit("c", [3, *PROMPT], 2)
    rig.step()
    rig.abort("a")
    rig.step()
    assert entries(rig) == ["a", "b"]
    rig.abort("b")
    rig.step()
    rig.step()
    assert entries(rig) == ["a", "b", "c"]
    rig.run()
    rig.assert_idle()


def test_a_client_gathers_for_a_time_and_starts_at_once_when_it_has_enough() -> None:
    rig = EngineRig(mode="client", max_num_seqs=4, gather_s=0.5, gather_count=3)
    rig.step()
    rig.submit("a", [1, *PROMPT], 3)
    rig.step()
    assert rig.executor.batches == []
    assert rig.engine.pause_s == pytest.approx(0.5)
    rig.now_s += 0.4
    rig.submit("b", [2, *PROMPT], 3)
    rig.step()
    assert rig.executor.batches == []
    assert rig.engine.pause_s == pytest.approx(0.1)
    rig.now_s += 0.1
    rig.step()
    assert rig.executor.batches == [[("a", 4), ("b", 4)]]
    rig.run()
    for index in range(3):
        rig.submit(f"c{index}", [10 + index, *PROMPT], 3)
    rig.step()
    assert [name for name, _ in rig.executor.batches[-1]] == ["c0", "c1", "c2"]


@pytest.mark.parametrize("mode", ["static", "client", "continuous"])
def test_without_paging_the_maximum_is_reserved_and_nobody_is_ever_preempted(mode: str) -> None:
    rig = EngineRig(mode=mode, num_blocks=16, max_num_seqs=8, gather_s=0.0)
    for index in range(8):
        rig.submit(f"r{index}", [index, *PROMPT], 17)
    rig.step()
    assert len(rig.scheduler.running) == 3, "five blocks each, for 20 tokens"
    assert rig.pool.counts.referenced == 15
    rig.run()
    assert not any(stats.num_preemptions for stats in rig.stats)
    rig.assert_idle()


def test_without_paging_gaps_between_reservations_are_of_no_use_to_whoever_needs_more() -> None:
    """Six blocks are free in the end, five of them between two that run and one behind them."""
    for mode, is_admitted in (("continuous", False), ("paged", True)):
        rig = EngineRig(mode=mode, num_blocks=16, max_num_seqs=8)
        for name in ("before", "gap", "behind"):
            rig.submit(name, [len(name), *PROMPT] * 4, 5)  # five blocks each
        for _ in range(2):
            rig.step()
        assert len(rig.scheduler.running) == 3
        rig.abort("gap")
        rig.submit("wide", [9] * 20, 5)
        rig.step()
        assert rig.pool.num_usable - rig.pool.counts.referenced + 6 * is_admitted >= 6
        assert any(request.request_id == "wide" for request in rig.scheduler.running) is is_admitted
        rig.run()
        rig.assert_generated("wide", [9] * 20, 5)
        rig.assert_idle()


def test_with_paging_more_run_at_once_and_without_batches_they_enter_one_by_one() -> None:
    widths = {}
    for mode in ("continuous", "paged", "full"):
        rig = EngineRig(mode=mode, num_blocks=16, max_num_seqs=8)
        for index in range(8):
            rig.submit(f"r{index}", [index, *PROMPT], 4 + 2 * index)
        rig.run()
        widths[mode] = max(stats.running + (stats.num_sampled > 0) for stats in rig.stats)
        assert len(rig.stats) < 70
    assert widths["continuous"] < widths["paged"] == widths["full"]


@pytest.mark.parametrize("mode", MODES)
def test_only_the_full_mode_shares_prefixes(mode: str) -> None:
    rig = EngineRig(mode=mode)
    for name in ("first", "again"):
        rig.submit(name, [1] * 13, 2)
        rig.run()
    assert (sum(stats.num_hit_tokens for stats in rig.stats) > 0) is (mode == "full") is MODES[mode].prefix_cache


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_fills_the_whole_pool_is_served(mode: str) -> None:
    rig = EngineRig(mode=mode, num_blocks=4)
    rig.submit("big", [1] * 12, 100)
    rig.submit("other", [2] * 12, 3)
    rig.run()
    rig.assert_generated("big", [1] * 12, 5)
    rig.assert_generated("other", [2] * 12, 3)
