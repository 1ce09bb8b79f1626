"""What the memory measurement counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.memory import AMPLE_TOKENS, run
from bench.workload import Work, mixed
from worker.engine.modes import MODES


def test_one_request_in_one_block_counts_its_own_slots() -> None:
    usage = run([Work(tuple(range(5)), 3)], MODES["paged"], 8)
    # After the first two steps 5 and 6 tokens are held in 8 slots; after the last nothing is held.
    assert (usage.held_tokens, usage.slots) == (5 + 6, 16)
    assert (usage.num_steps, usage.num_tokens) == (3, 7)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_a_few_requests(mode: str) -> None:
    work = mixed(3)
    usage = run(work, MODES[mode])
    assert usage.num_tokens >= sum(len(request.prompt) + request.num_output - 1 for request in work)
    assert 0 < usage.held_tokens <= usage.slots


@pytest.mark.parametrize("mode", ["paged", "full"])
def test_paged_blocks_leave_little_unused_and_smaller_ones_less(mode: str) -> None:
    work = mixed(24)
    held = {size: run(work, MODES[mode], size).utilization for size in (2, 16, 64)}
    assert held[16] >= 0.96
    assert held[2] > held[16] > held[64]


def test_the_load_that_shows_the_prefix_caches_cost_finds_nothing_in_it() -> None:
    usage = run(mixed(24), replace(MODES["paged"], prefix_cache=True), pool_tokens=AMPLE_TOKENS)
    assert usage.num_hits == 0
