"""The block pool: order of eviction, twins, counts, and what its audit finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.cache.block import BlockKey
from worker.cache.pool import BlockCounts, BlockPool, IntegrityError


def key(number: int, salt: str = "") -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), salt, bytes([number]))


def take_published(pool: BlockPool, number: int) -> int:
    block_id = pool.take().block_id
    pool.publish(block_id, key(number))
    return block_id


def test_a_pool_needs_a_block_besides_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_the_null_block_is_no_capacity_and_nobody_gets_it() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take().block_id for _ in range(4)) == [1, 2, 3, 4]
    assert pool.counts == BlockCounts(empty=0, cached=0, referenced=4, swapping=0, null=1)
    with pytest.raises(IndexError):
        pool.take()


def test_empty_blocks_go_before_cached_ones_and_these_least_recently_used_first() -> None:
    pool = BlockPool(6)
    first, second, third = (take_published(pool, number) for number in (1, 2, 3))
    unhashed = pool.take().block_id
    for block_id in (second, first, third, unhashed):
        pool.release(block_id)
    never_used = 5
    assert [pool.take().block_id for _ in range(5)] == [unhashed, never_used, second, first, third]
    assert all(pool.find(key(number)) is None for number in (1, 2, 3))


def test_a_touched_block_leaves_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4)
    held = [take_published(pool, number) for number in (1, 2, 3)]
    for block_id in held:
        pool.release(block_id)
    block = pool.find(key(2))
    assert block is not None
    pool.touch(block)
    assert pool.counts == BlockCounts(empty=0, cached=2, referenced=1, swapping=0, null=1)
    assert [pool.take().block_id for _ in range(2)] == [held[0], held[2]]
    pool.check_integrity([[held[1]], [held[0], held[2]]])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 7)), max_size=40))
def test_a_run_is_the_first_gap_that_is_wide_enough(actions: list[tuple[bool, int]]) -> None:
    pool = BlockPool(17)
    runs: list[list[int]] = []
    for is_taken, number in actions:
        held = {block_id for run in runs for block_id in run}
        places = (range(start, start + number) for start in range(1, 18 - number))
        wanted = next((list(place) for place in places if held.isdisjoint(place)), None)
        assert pool.find_run(number) == (wanted and wanted[0])
        if is_taken and wanted:
            assert [block.block_id for block in pool.take_run(wanted[0], number)] == wanted
            runs.append(wanted)
        elif runs:
            for block_id in runs.pop(number % len(runs)):
                pool.release(block_id)
        pool.check_integrity(runs)


def test_a_block_stays_hittable_while_a_twin_lives_and_only_one_twin_is_cached() -> None:
    pool = BlockPool(5)
    twins = [take_published(pool, 7) for _ in range(3)]
    pool.release(twins[0])
    assert pool.counts.cached == 0, "two others hold the same"
    pool.check_integrity()
    pool.release(twins[2])
    pool.release(twins[1])
    assert pool.counts == BlockCounts(empty=3, cached=1, referenced=0, swapping=0, null=1)
    found = pool.find(key(7))
    assert found is not None
    assert found.block_id == twins[1]


def test_the_same_content_under_another_salt_is_not_found() -> None:
    pool = BlockPool(3)
    pool.publish(pool.take().block_id, key(1, "acme"))
    assert pool.find(key(1, "acme")) is not None
    assert pool.find(key(1, "evil")) is None


def test_equal_digests_of_other_tokens_are_not_found() -> None:
    pool = BlockPool(3)
    pool.publish(pool.take().block_id, BlockKey(b"same digest 0000", "", b"\x01"))
    assert pool.find(BlockKey(b"same digest 0000", "", b"\x02")) is None


def test_double_release_and_publishing_twice_are_refused() -> None:
    pool = BlockPool(3)
    block_id = take_published(pool, 1)
    with pytest.raises(IntegrityError, match="publish"):
        pool.publish(block_id, key(2))
    pool.release(block_id)
    with pytest.raises(IntegrityError, match="release"):
        pool.release(block_id)
    with pytest.raises(IntegrityError, match="publish"):
        pool.publish(block_id, key(2))


@pytest.mark.parametrize("fault", ["leak", "foreign reference", "lost key", "miscount", "null in use"])
def test_the_audit_finds(fault: str) -> None:
    pool = BlockPool(6)
    table = [take_published(pool, 1), pool.take().block_id]
    cached = take_published(pool, 2)
    pool.release(cached)
    pool.check_integrity([table])
    if fault == "leak":
        table.pop()
    elif fault == "foreign reference":
        table.append(cached)
    elif fault == "lost key":
        pool.blocks[cached].key = None
    elif fault == "miscount":
        pool.blocks[table[0]].ref_count = 0
    else:
        pool.blocks[0].ref_count = 1
    with pytest.raises(IntegrityError):
        pool.check_integrity([table])


class PoolMachine(RuleBasedStateMachine):
    """Random use of a small pool, against a plain model of what is referenced, cached, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.tables: list[int] = []  # one entry per reference
        self.keys: dict[int, int] = {}  # key number by block id, of referenced and cached blocks
        self.cached: list[int] = []  # block ids, least recently used first

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self) -> None:
        block_id = self.pool.take().block_id
        if block_id in self.cached:
            assert len(self.cached) == self.pool.num_free + 1, "an empty block was there"
            assert self.cached.pop(0) == block_id
            del self.keys[block_id]
        assert block_id not in self.tables
        self.tables.append(block_id)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.tables))
        self.tables.remove(block_id)
        self.pool.release(block_id)
        if block_id in self.tables or block_id not in self.keys:
            return
        number = self.keys[block_id]
        if list(self.keys.values()).count(number) > 1:
            del self.keys[block_id]
        else:
            self.cached.append(block_id)

    @precondition(lambda self: bool(set(self.tables) - set(self.keys)))
    @rule(data=st.data(), number=st.integers(1, 4))
    def publish(self, data: st.DataObject, number: int) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.tables) - set(self.keys))))
        self.pool.publish(block_id, key(number))
        self.keys[block_id] = number

    @rule(number=st.integers(1, 4))
    def hit(self, number: int) -> None:
        block = self.pool.find(key(number))
        assert (block is not None) == (number in self.keys.values())
        if block is not None:
            assert self.keys[block.block_id] == number
            self.pool.touch(block)
            self.tables.append(block.block_id)
            if block.block_id in self.cached:
                self.cached.remove(block.block_id)

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check_integrity([self.tables])
        counts = self.pool.counts
        assert counts.total == 7
        assert counts.cached == len(self.cached)
        assert counts.referenced == len(set(self.tables))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
