"""Preempted requests' blocks in host memory: the same tokens, exact books, and only what is needed moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from common.types import Band, SamplingParams
from common.window import Window
from tests.support.fake_executor import generate
from tests.unit.worker.engine.rig import VOCAB_SIZE, EngineRig
from tests.unit.worker.engine.test_engine_stateful import STOP_TOKENS, EngineMachine
from worker.cache.block import BlockKey, keyed_digest
from worker.cache.host import HostTier
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.request import Request

BLOCK = 4


def make_rig(**options: Any) -> EngineRig:
    return EngineRig(**{"num_blocks": 12, "block_size": BLOCK, "host_slots": 64} | options)


def copies(rig: EngineRig, kind: str) -> int:
    assert rig.copier is not None
    return sum(len(getattr(orders, kind)) for orders in rig.copier.orders)


def preempt(rig: EngineRig, request_id: str) -> None:
    rig.scheduler.preempt(next(r for r in rig.scheduler.running if r.request_id == request_id))


def run_until(rig: EngineRig, request_id: str, num_tokens: int) -> None:
    while len(rig.of(request_id).token_ids) < num_tokens:
        rig.step()


def push_out(rig: EngineRig, num_blocks: int = 12) -> None:
    """Has so many blocks taken by somebody who gives them back before anybody can return."""
    sampling = SamplingParams(seed=0, max_tokens=1)
    tokens = [9] * (num_blocks * BLOCK)
    flood = Request("flood", 1, 1, tokens, len(tokens), sampling, Band.HIGH, "flood", 1 << 30)
    assert rig.manager.admit(flood)
    assert rig.manager.cover(flood, len(tokens)) == len(tokens)
    rig.manager.free(flood)


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 11, 12, 13])
@pytest.mark.parametrize("num_made", [1, 2, 3, 4, 5, 8, 9])
def test_preempted_at_any_place_around_a_block_it_continues_from_its_saved_blocks(
    num_prompt: int, num_made: int
) -> None:
    rig = make_rig()
    prompt = list(range(num_prompt))
    rig.submit("r", prompt, 20)
    run_until(rig, "r", num_made)
    num_computed = rig.scheduler.running[0].num_computed
    preempt(rig, "r")
    push_out(rig)
    rig.run()
    rig.assert_generated("r", prompt, 20)
    assert copies(rig, "loads") == num_computed // BLOCK
    assert sum(stats.num_recomputed_tokens for stats in rig.stats) == num_computed % BLOCK
    rig.assert_idle()
    assert rig.pool.counts.swapping == 0


def test_nothing_is_copied_while_there_is_room() -> None:
    rig = make_rig(num_blocks=64)
    rig.submit("r", list(range(20)), 20)
    run_until(rig, "r", 5)
    preempt(rig, "r")
    rig.run()
    rig.assert_generated("r", list(range(20)), 20)
    assert rig.copier is not None
    assert rig.copier.orders == []


def test_only_the_tail_moves_if_only_the_tail_is_needed() -> None:
    rig = make_rig(num_blocks=60)
    rig.submit("r", list(range(160)), 20)
    run_until(rig, "r", 2)  # 41 blocks, 40 of them full
    preempt(rig, "r")
    push_out(rig, 25)  # 19 of 60 are empty, one more has the last token
    rig.run()
    rig.assert_generated("r", list(range(160)), 20)
    assert copies(rig, "loads") == 5
    assert copies(rig, "saves") == 5


def test_what_is_copied_beside_the_step_counts_as_swapping_until_it_is_done() -> None:
    rig = make_rig(copy_delay=2)
    prompts = {"first": list(range(20)), "second": list(range(20, 40))}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 24)  # 11 of 12 blocks each
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_generated(name, prompt, 24)
    assert sum(stats.num_preemptions for stats in rig.stats) > 0
    assert max(stats.swapping_blocks for stats in rig.stats) > 0
    assert copies(rig, "aside") > 0
    assert copies(rig, "loads") > 0
    assert rig.pool.counts.swapping == 0


def test_a_repeated_prompt_finds_the_saved_blocks_and_another_tenant_does_not() -> None:
    rig = make_rig()
    prompt = list(range(24))
    rig.submit("r", prompt, 20, cache_salt="acme")
    run_until(rig, "r", 2)
    preempt(rig, "r")
    push_out(rig)
    rig.abort("r")
    for name, salt, found in (("same", "acme", 20), ("foreign", "", 0)):
        push_out(rig)
        rig.submit(name, prompt, 5, cache_salt=salt)
        rig.run()
        rig.assert_generated(name, prompt, 5, salt=salt)
        assert rig.of(name).cached_prompt_tokens[0] == found
    assert copies(rig, "loads") == 5


def test_without_room_in_the_host_it_is_computed_again() -> None:
    rig = make_rig(host_slots=4)
    rig.submit("r", list(range(20)), 20)  # 5 full blocks
    run_until(rig, "r", 2)
    preempt(rig, "r")
    push_out(rig)
    rig.run()
    rig.assert_generated("r", list(range(20)), 20)
    assert copies(rig, "saves") + copies(rig, "aside") + copies(rig, "loads") == 0
    assert sum(stats.num_recomputed_tokens for stats in rig.stats) >= 20


def test_it_is_computed_again_where_copying_takes_longer() -> None:
    """A token takes about half a millisecond until something else was measured, so 20 take 10 ms."""
    for block_s, is_copied in ((0.0005, True), (0.002, False)):  # both ways, 5 blocks: 5 ms, 20 ms
        rig = make_rig(block_s=block_s)
        rig.submit("r", list(range(20)), 20)
        run_until(rig, "r", 1)
        preempt(rig, "r")
        push_out(rig)
        rig.run()
        rig.assert_generated("r", list(range(20)), 20)
        assert (copies(rig, "loads") > 0) == is_copied


def test_a_second_preemption_saves_only_what_is_new() -> None:
    rig = make_rig()
    prompt = list(range(16))
    rig.submit("r", prompt, 24)
    run_until(rig, "r", 2)
    preempt(rig, "r")
    push_out(rig)
    run_until(rig, "r", 10)
    before = copies(rig, "saves") + copies(rig, "aside")
    preempt(rig, "r")
    rig.submit("again", [8] * 44, 2, band=Band.HIGH)
    rig.run()
    rig.assert_generated("r", prompt, 24)
    assert before == 4
    assert copies(rig, "saves") + copies(rig, "aside") - before <= 2


def test_claimed_slots_stay_until_their_request_returns() -> None:
    rig = make_rig(num_blocks=20, host_slots=4)
    prompts = {name: [token] * 12 + [3] for name, token in (("a", 1), ("b", 2))}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 8)
        run_until(rig, name, 1)
    for name in prompts:
        preempt(rig, name)  # the first claims 3 of 4 slots, the second finds no room
    push_out(rig, 20)
    assert rig.host is not None
    assert len(rig.host._claims) == 1
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_generated(name, prompt, 8)
    assert copies(rig, "loads") == 3
    assert rig.host._claims == {}


def test_a_slot_that_is_read_in_a_step_is_not_given_away_in_it() -> None:
    pool = BlockPool(8)
    tier = HostTier(pool, 1, lambda: 0.0)
    keys = [BlockKey(bytes([index]), "", b"") for index in range(2)]
    blocks = [pool.take() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block.block_id, key)
        pool.release(block.block_id)
    assert tier.keep(1, blocks[:1], 1.0)
    tier.before_take(blocks[0])
    tier.release(1)
    assert len(tier.take_orders().saves) == 1
    hit = tier.find(keys[0])
    assert hit is not None
    assert tier.keep(2, blocks[1:], 1.0)
    tier.hold([hit])
    tier.before_take(blocks[1])
    assert tier.take_orders().saves == []
    assert tier.find(keys[0]) == hit
    assert tier.find(keys[1]) is None


def test_the_slot_of_an_awaited_copy_that_nobody_wants_any_more_is_given_away_behind_it() -> None:
    pool = BlockPool(3)  # two blocks can be used
    tier = HostTier(pool, 1, lambda: 0.0)
    keys = [BlockKey(bytes([index]), "", b"") for index in range(2)]
    blocks = [pool.take() for _ in keys]
    for block, key in zip(blocks, keys, strict=True):
        pool.publish(block.block_id, key)
        pool.release(block.block_id)
    assert tier.keep(1, blocks[:1], 1.0)
    [copy] = tier.take_orders().aside
    tier.release(1)
    tier.before_take(blocks[0])
    assert tier.keep(2, blocks[1:], 1.0)
    orders = tier.take_orders()
    assert (orders.awaited, orders.saves) == ([copy], [])
    assert [each.slot for each in orders.aside] == [copy.slot]
    tier.complete([copy])  # late: of what was awaited
    assert tier.find(keys[1]) is None
    tier.complete(orders.aside)
    assert tier.find(keys[1]) is not None
    tier.check_integrity()


def test_it_needs_the_prefix_cache_and_its_copier() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="prefix cache, which is off"):
        CacheManager(pool, BLOCK, keyed_digest(b""), prefix_cache=False, host=HostTier(pool, 1, lambda: 0.0))
    with pytest.raises(ValueError, match="num_slots is 0"):
        HostTier(pool, 0, lambda: 0.0)


class SwapMachine(EngineMachine):
    """The random lives of the engine's test, with host memory of all sizes and slow copies; sometimes a window."""

    @initialize(
        num_blocks=st.integers(5, 12),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        host_slots=st.integers(1, 24),
        copy_delay=st.integers(0, 3),
        max_chunk=st.integers(1, 9),
        window=st.one_of(st.none(), st.none(), st.integers(1, 12)),
        long_after=st.integers(0, 6),
    )
    def start(self, **drawn: Any) -> None:
        window = None if drawn["window"] is None else Window(drawn["window"], 2)
        block_size, num_blocks = drawn["block_size"], drawn["num_blocks"]
        if window is not None:
            num_blocks += window.max_blocks(1, block_size)
        self.rig = EngineRig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=drawn["max_num_seqs"],
            budget=drawn["max_num_seqs"] + 8,
            max_chunk=drawn["max_chunk"],
            context_length=40,
            eos_token_ids=STOP_TOKENS,
            window=window,
            host_slots=drawn["host_slots"],
            copy_delay=drawn["copy_delay"],
            long_after_steps=drawn["long_after"],
        )
        self.rig.cost_s = lambda batch: 0.001 * batch.num_tokens  # more than copies take
        self.max_length = 40 if window else min(40, num_blocks * block_size + 1)
        self.begin()

    @rule()
    def preempt_everybody(self) -> None:
        for request in list(self.rig.scheduler.running):
            self.rig.scheduler.preempt(request)

    @rule(share=st.floats(0.3, 1))
    def preempt_everybody_and_take_their_blocks(self, share: float) -> None:
        self.preempt_everybody()
        pool, take = self.rig.pool, self.rig.manager._take
        for block_id in [take() for _ in range(int(share * pool.num_free))]:
            pool.release(block_id)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "rig"):
            assert self.rig.pool.counts.swapping == 0
            assert self.rig.host is not None
            assert not self.rig.host._claims


SwapMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSwap = SwapMachine.TestCase


@settings(max_examples=120, deadline=None)
@given(
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    host_slots=st.integers(1, 30),
    copy_delay=st.integers(0, 4),
    window=st.one_of(st.none(), st.none(), st.integers(1, 9)),
    num_prompts=st.lists(st.integers(1, 24), min_size=2, max_size=5),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.integers(1, 4)),
            st.tuples(st.just("preempt"), st.integers(0, 4)),
            st.tuples(st.just("take"), st.integers(1, 30)),
            st.tuples(st.just("abort"), st.integers(0, 40)),
        ),
        min_size=10,
        max_size=60,
    ),
)
def test_any_schedule_of_preemptions_gives_the_same_tokens(
    block_size: int,
    spare_blocks: int,
    host_slots: int,
    copy_delay: int,
    window: int | None,
    num_prompts: list[int],
    actions: list[tuple[str, int]],
) -> None:
    seen = None if window is None else Window(window, 1)
    rig = EngineRig(
        num_blocks=-(-50 // block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=3,
        max_chunk=7,
        window=seen,
        host_slots=host_slots,
        copy_delay=copy_delay,
    )
    rig.cost_s = lambda batch: 0.001 * batch.num_tokens
    prompts = {f"r{index}": [index // 2] * count for index, count in enumerate(num_prompts)}  # pairs share a prefix
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 25)
    aborted = set()
    for action, number in actions:
        running = rig.scheduler.running
        if action == "step":
            for _ in range(number):
                rig.step()
        elif action == "preempt" and running:
            rig.scheduler.preempt(running[number % len(running)])
        elif action == "take":
            taken = [rig.manager._take() for _ in range(min(number, rig.pool.num_free))]
            for block_id in taken:
                rig.pool.release(block_id)
        elif action == "abort" and number < len(prompts) and not rig.of(f"r{number}").is_ended:
            rig.abort(f"r{number}")
            aborted.add(f"r{number}")
    rig.run()
    for name, prompt in prompts.items():
        if name in aborted:
            told = rig.of(name).token_ids
            assert told == generate(prompt, 25, vocab_size=VOCAB_SIZE)[: len(told)]
        else:
            rig.assert_generated(name, prompt, 25)
    rig.assert_idle()
    assert rig.pool.counts.swapping == 0
    assert rig.host is not None
    assert not rig.host._claims
