"""Blocks behind a window: given back in time, never read, found again by the prefix cache, and constant in number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from common.errors import InvalidRequestError
from common.types import Band, Reason, SamplingParams
from common.window import UNBOUNDED, Window, Windows, max_tokens, narrow, num_held_blocks
from tests.support.fake_executor import generate
from tests.unit.worker.engine.rig import VOCAB_SIZE, EngineRig
from tests.unit.worker.engine.test_engine_stateful import STOP_TOKENS, EngineMachine
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.request import Request

BLOCK = 4


def make_request(token_ids: Sequence[int], salt: str = "") -> Request:
    sampling = SamplingParams(seed=0, max_tokens=1)
    return Request("r", 1, 1, list(token_ids), len(token_ids), sampling, Band.NORMAL, salt, 1)


@settings(max_examples=200, deadline=None)
@given(num_tokens=st.integers(1, 40), sinks=st.integers(0, 20), computed=st.integers(0, 200), size=st.integers(1, 9))
def test_the_first_block_kept_is_the_first_that_is_seen(num_tokens: int, sinks: int, computed: int, size: int) -> None:
    window = Window(num_tokens, sinks)
    seen = {position // size for position in range(max(0, computed - num_tokens + 1), computed + 1)}
    behind_sinks = [block for block in seen if block >= -(-sinks // size)]
    kept = window.first_block(computed, size)
    assert kept == (min(behind_sinks) if behind_sinks else -(-sinks // size))


@settings(max_examples=200, deadline=None)
@given(num_tokens=st.integers(1, 40), chunk=st.integers(1, 20), size=st.integers(1, 9))
def test_no_chunk_needs_more_than_the_most_blocks(num_tokens: int, chunk: int, size: int) -> None:
    needed = [
        (start + chunk - 1) // size - max(0, start - num_tokens + 1) // size + 1
        for start in range(num_tokens + 2 * size)
    ]
    assert max(needed) == Window(num_tokens).max_blocks(chunk, size)


def test_a_limit_narrows_the_models_own_window_and_brings_sinks() -> None:
    assert narrow(None, None) is None
    assert narrow(Window(100), None) == Window(100)
    assert narrow(Window(100), Window(100, 4)) == Window(100)
    assert narrow(Window(100), Window(99, 4)) == Window(99, 4)
    assert narrow(None, Window(64, 4)) == Window(64, 4)
    with pytest.raises(ValueError, match="0 tokens and -1 sinks"):
        Window(0, -1)


@pytest.mark.parametrize("sinks", [0, 1, 5])
@pytest.mark.parametrize("mode", ["full", "paged", "continuous"])
def test_a_conversation_of_any_length_runs_in_the_same_few_blocks(sinks: int, mode: str) -> None:
    """Prompt and output are each many times the pool; nobody is preempted."""
    window = Window(10, sinks)
    most = window.max_blocks(7, BLOCK)
    rig = EngineRig(num_blocks=most, block_size=BLOCK, max_chunk=7, window=window, mode=mode, prefix_cache=False)
    prompt = random.Random(1).choices(range(50), k=20 * most * BLOCK)
    rig.submit("long", prompt, 300)
    held = set()
    while rig.engine.has_work:
        stats = rig.step()
        held.add(stats.referenced_blocks)
        assert stats.num_preemptions == 0
    rig.assert_generated("long", prompt, 300)
    assert max(held) <= most
    rig.assert_idle()


def test_while_it_decodes_a_request_holds_its_window_only() -> None:
    rig = EngineRig(num_blocks=64, block_size=BLOCK, max_chunk=16, window=Window(10, 4))
    rig.submit("long", list(range(200)), 100)
    held = [rig.step().referenced_blocks for _ in range(60)]
    assert set(held[30:]) == {4, 5}  # the sinks' block and 10 tokens in 3 or 4, the last of which may be new
    rig.run()
    rig.assert_generated("long", list(range(200)), 100)


@pytest.mark.parametrize("length", [9, 10, 11, 12, 13, 23, 24, 25])
def test_lengths_around_window_and_block(length: int) -> None:
    rig = EngineRig(num_blocks=8, block_size=BLOCK, max_chunk=5, window=Window(10, 2))
    for salt in ("", "again"):
        rig.submit(salt, list(range(length)), 20, cache_salt=salt)
        rig.run()
        rig.assert_generated(salt, list(range(length)), 20, salt=salt)


def test_a_pool_without_room_for_window_and_a_token_is_the_bound() -> None:
    rig = EngineRig(num_blocks=3, block_size=BLOCK, window=Window(12))
    with pytest.raises(InvalidRequestError) as caught:
        rig.submit("r", list(range(12)), 4)
    assert caught.value.reason is Reason.NEVER_FITS
    rig.submit("fits", list(range(11)), 4)
    rig.run()
    assert len(rig.of("fits").token_ids) == 2


def test_two_long_prompts_in_a_pool_for_two_windows_both_advance() -> None:
    """Neither pins what it has computed: blocks behind the window go back before anybody asks for more."""
    window = Window(8)
    rig = EngineRig(num_blocks=2 * window.max_blocks(4, BLOCK), block_size=BLOCK, max_chunk=4, budget=8, window=window)
    prompts = {name: random.Random(name).choices(range(50), k=300) for name in ("a", "b")}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 20)
    rig.run()
    for name, prompt in prompts.items():
        rig.assert_generated(name, prompt, 20)
    assert sum(stats.num_preemptions for stats in rig.stats) == 0


def hit_of(manager: CacheManager, token_ids: Sequence[int], salt: str = "") -> Request:
    request = make_request(token_ids, salt)
    assert manager.admit(request)
    return request


def cache_of(window: Window, token_ids: Sequence[int], *, num_blocks: int = 64) -> CacheManager:
    """A manager whose cache holds all full blocks of a sequence."""
    manager = CacheManager(BlockPool(num_blocks + 1), BLOCK, keyed_digest(b""), windows=(window,), max_chunk_tokens=8)
    request = make_request(token_ids)
    assert manager.admit(request)
    while request.num_computed < request.num_tokens:
        room = manager.cover(request, request.num_computed + 8)
        request.num_computed = min(request.num_computed + 8, request.num_tokens, room)
        manager.publish(request)
        manager.slide([request])
    manager.free(request)
    return manager


def evict(manager: CacheManager, token_ids: Sequence[int], *indices: int) -> None:
    """Takes blocks of a sequence out of the cache."""
    request = make_request(token_ids)
    for index in indices:
        block = manager.pool.find(manager._prefixes.key(request, index))
        assert block is not None
        manager.pool._forget(block)
        manager.pool._num_cached -= 1
        manager.pool._num_empty += 1
    manager.pool.check_integrity()


@pytest.mark.parametrize(
    ("gone", "hit", "holes"),
    [
        ((), 7, 4),  # of 29 tokens, 7 full blocks; the next token sees 10, in blocks 4 to 6
        ((0, 1, 2, 3), 7, 4),  # hidden: nobody needs them
        ((6,), 6, 3),
        ((5,), 5, 2),
        ((4,), 4, 1),
        ((2, 5), 2, 0),  # 2 is seen from the end of block 4; what is left is short of a window, and whole
        ((0, 3, 6), 0, 0),
    ],
)
def test_a_hit_needs_the_last_window_and_no_more(gone: tuple[int, ...], hit: int, holes: int) -> None:
    tokens = list(range(29))
    manager = cache_of(Window(10), tokens)
    evict(manager, tokens, *gone)
    request = hit_of(manager, tokens)
    assert (request.num_computed, request.num_holes) == (hit * BLOCK, holes)
    assert request.block_ids[:hit].count(0) == holes
    assert 0 not in request.block_ids[hit:]
    manager.check_integrity([request])


@pytest.mark.parametrize(("gone", "hit"), [((), 7), ((0,), 0), ((1,), 1), ((2, 3), 7), ((2, 6), 6), ((2, 5), 2)])
def test_a_hit_needs_the_sinks_as_well(gone: tuple[int, ...], hit: int) -> None:
    tokens = list(range(29))
    manager = cache_of(Window(10, 6), tokens)  # sinks in blocks 0 and 1
    evict(manager, tokens, *gone)
    request = hit_of(manager, tokens)
    assert request.num_computed == hit * BLOCK
    assert 0 not in request.block_ids[:2]
    manager.check_integrity([request])


def test_the_same_prompt_gives_the_same_tokens_whatever_ran_before() -> None:
    rig = EngineRig(num_blocks=64, block_size=BLOCK, max_chunk=6, window=Window(10, 3))
    prompt = [7] * 50
    for name in ("a", "b", "c", "d"):
        rig.submit(name, prompt, 30)
        rig.submit(f"{name}-other", [8] * 30, 10)
        rig.run()
        rig.assert_generated(name, prompt, 30)
    assert rig.of("b").cached_prompt_tokens[0] >= 40


def test_another_tenant_finds_nothing() -> None:
    tokens = list(range(29))
    manager = cache_of(Window(10), tokens)
    assert hit_of(manager, tokens, salt="other").num_computed == 0


WINDOWS = st.builds(Window, st.integers(1, 20), st.integers(0, 6))


class WindowMachine(EngineMachine):
    """The random lives of the engine's test, behind windows: of the model, in all layers or some, and of requests."""

    @initialize(
        windows=st.one_of(st.tuples(WINDOWS), st.lists(st.none() | WINDOWS, min_size=1, max_size=3).map(tuple)),
        own_windows=st.lists(WINDOWS, max_size=2),
        spare_blocks=st.integers(0, 6),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        max_chunk=st.integers(1, 9),
        mode=st.sampled_from(["full", "full", "paged", "continuous", "static"]),
        host_slots=st.sampled_from([0, 0, 10]),
    )
    def start(self, windows: Windows, own_windows: list[Window], **drawn: Any) -> None:
        block_size, max_num_seqs, is_full = drawn["block_size"], drawn["max_num_seqs"], drawn["mode"] == "full"
        self.rig = EngineRig(
            num_blocks=num_held_blocks(windows, 12, 1, block_size) + drawn["spare_blocks"],
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + 6,
            max_chunk=drawn["max_chunk"],
            context_length=40,
            eos_token_ids=STOP_TOKENS,
            mode=drawn["mode"],
            windows=windows,
            host_slots=drawn["host_slots"] if is_full else 0,
            copy_delay=1,
            long_after_steps=3,
        )
        self.rig.cost_s = lambda batch: 0.001 * batch.num_tokens
        most = self.rig.limits.max_window_tokens
        self.own_windows = (None, *(it for it in own_windows if it.num_sinks <= it.num_tokens <= most))
        self.max_length = 40
        self.begin()

    @invariant()
    def nobody_holds_more_than_its_layers_see(self) -> None:
        if not hasattr(self, "rig"):
            return
        size, step = self.rig.manager.block_size, self.rig.manager.num_tables
        for request in self.rig.scheduler.running:
            for table, window in enumerate(request.windows):
                held = sum(block_id != 0 for block_id in request.block_ids[table::step])
                assert window is None or held <= window.max_blocks(self.rig.limits.max_chunk_tokens, size)


WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWindow = WindowMachine.TestCase


def test_what_is_generated_does_not_depend_on_the_pool() -> None:
    """Preempted and resumed behind the window, at every length around a block."""
    for num_prompt in range(15, 25):
        prompt = list(range(num_prompt))
        rig = EngineRig(num_blocks=8, block_size=BLOCK, max_chunk=6, window=Window(10, 3))
        rig.submit("r", prompt, 20)
        rig.submit("other", [9] * num_prompt, 20)
        for _ in range(12):
            rig.step()
            if rig.scheduler.running:
                rig.scheduler.preempt(rig.scheduler.running[0])
        rig.run()
        assert rig.of("r").token_ids == generate(prompt, 20, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("own", "sampling", "field"),
    [
        (Window(10), {"kv_window_tokens": 11}, "kv_window_tokens"),
        (None, {"kv_window_tokens": 0}, "kv_window_tokens"),
        (None, {"kv_window_tokens": 4097}, "kv_window_tokens"),
        (None, {"kv_window_tokens": 8, "kv_sink_tokens": 9}, "kv_sink_tokens"),
    ],
)
def test_a_request_may_see_less_than_the_model_and_not_more(
    own: Window | None, sampling: dict[str, int], field: str
) -> None:
    rig = EngineRig(windows=(own,))
    with pytest.raises(InvalidRequestError) as caught:
        rig.submit("r", [1, 2, 3], sampling=sampling)
    assert [violation.field for violation in caught.value.fields] == [f"sampling.{field}"]


def test_a_request_behind_its_own_window_leaves_the_pool_to_others() -> None:
    """It gets far longer than the pool, beside one that sees everything and fills most of it."""
    window = Window(10, 2)
    most = window.max_blocks(6, BLOCK)
    rig = EngineRig(num_blocks=most + 20, block_size=BLOCK, max_chunk=6, budget=12)
    long, short = random.Random(1).choices(range(50), k=600), list(range(40))
    rig.submit("long", long, 200, window=window)
    rig.submit("short", short, 40)
    rig.run()
    rig.assert_generated("long", long, 200, salt=rig.salt("", window, 800))
    rig.assert_generated("short", short, 40)
    assert sum(stats.num_preemptions for stats in rig.stats) == 0
    rig.assert_idle()


@pytest.mark.parametrize(("num_tokens", "is_shared"), [(27, False), (28, True), (200, True)])
def test_blocks_are_shared_between_windows_only_while_nothing_is_hidden(num_tokens: int, is_shared: bool) -> None:
    rig = EngineRig(num_blocks=64, block_size=BLOCK)
    prompt, window = list(range(20)), Window(num_tokens)
    rig.submit("whole", prompt, 8)
    rig.run()
    rig.submit("windowed", prompt, 8, window=window)
    rig.run()
    rig.assert_generated("windowed", prompt, 8, salt=rig.salt("", window, 28))
    assert rig.of("windowed").cached_prompt_tokens[0] == (16 if is_shared else 0)
    rig.submit("again", prompt, 8, window=window)
    rig.run()
    assert rig.of("again").cached_prompt_tokens[0] == 16


def test_a_group_of_layers_with_a_window_gives_back_while_another_keeps() -> None:
    local = Window(10)
    rig = EngineRig(num_blocks=64, block_size=BLOCK, max_chunk=8, windows=(None, local, local))
    prompt = list(range(60))
    rig.submit("r", prompt, 100)
    held = [rig.step().referenced_blocks for _ in range(90)]
    rig.run()
    rig.assert_generated("r", prompt, 100)
    num_global = [-(-(60 + step) // BLOCK) for step in range(90)]
    assert all(
        count <= of_global + 1 + 2 * local.max_blocks(8, BLOCK)
        for count, of_global in zip(held, num_global, strict=True)
    )
    assert held[-1] > held[20] + 10
    rig.assert_idle()


@settings(max_examples=100, deadline=None)
@given(
    windows=st.lists(st.none() | WINDOWS, min_size=1, max_size=3).map(tuple),
    num_blocks=st.integers(1, 40),
    size=st.integers(1, 5),
)
def test_the_most_tokens_fit_and_one_more_does_not(windows: Windows, num_blocks: int, size: int) -> None:
    most = max_tokens(windows, num_blocks, size)
    if most < UNBOUNDED:
        assert num_held_blocks(windows, most, 1, size) <= num_blocks
        assert num_held_blocks(windows, most + 1, 1, size) > num_blocks
    else:
        assert num_held_blocks(windows, 10**9, 1, size) <= num_blocks
