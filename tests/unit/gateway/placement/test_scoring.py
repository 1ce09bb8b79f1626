from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import ModelLimits
from gateway.placement.scoring import MAX_BLOCKS, CachedPrefixes, Prefix

BLOCK_SIZE = 4


def limits(num_blocks: int = 100, block_size: int = BLOCK_SIZE) -> ModelLimits:
    return ModelLimits("m", 4096, 1000, block_size, num_blocks, 8)


def prefixes(*workers: str, num_blocks: int = 100) -> CachedPrefixes:
    made = CachedPrefixes()
    for worker in workers:
        made.add(worker, 1, limits(num_blocks))
    return made


def prompt(*token_ids: int, salt: str = "acme") -> Prefix:
    return Prefix(token_ids, salt)


class TestPrefix:
    def test_only_full_blocks_count_and_one_token_stays_to_compute(self) -> None:
        assert [len(prompt(*range(n)).names(BLOCK_SIZE)) for n in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]

    def test_a_name_stands_for_all_before_it(self) -> None:
        one, other = prompt(*range(13)).names(BLOCK_SIZE), prompt(99, *range(1, 13)).names(BLOCK_SIZE)
        assert not set(one) & set(other)
        assert prompt(*range(9), 7, 7, 7, 7).names(BLOCK_SIZE)[:2] == one[:2]

    def test_tenants_share_nothing(self) -> None:
        ids = range(13)
        assert not set(prompt(*ids).names(BLOCK_SIZE)) & set(prompt(*ids, salt="other").names(BLOCK_SIZE))

    def test_only_so_many_blocks_are_named(self) -> None:
        assert len(prompt(*range(BLOCK_SIZE * (MAX_BLOCKS + 9))).names(BLOCK_SIZE)) == MAX_BLOCKS


class TestCachedPrefixes:
    def test_what_was_sent_is_believed_there_and_nowhere_else(self) -> None:
        known = prefixes("w1", "w2")
        known.note("w1", 1, prompt(*range(20)))
        assert known.believed(prompt(*range(10), 0, 0, 0, 0), ["w1", "w2", "never-seen"]) == {"w1": 2}
        assert known.believed(prompt(*range(10), salt="other"), ["w1", "w2"]) == {}

    def test_block_sizes_differ_by_worker(self) -> None:
        known = prefixes("w1")
        known.add("w2", 1, limits(block_size=8))
        for worker in ("w1", "w2"):
            known.note(worker, 1, prompt(*range(17)))
        assert known.believed(prompt(*range(17)), ["w1", "w2"]) == {"w1": 4, "w2": 2}

    def test_a_new_start_has_nothing_and_an_old_one_cannot_speak_for_it(self) -> None:
        known = prefixes("w1")
        known.note("w1", 1, prompt(*range(9)))
        known.add("w1", 1, limits())
        assert known.believed(prompt(*range(9)), ["w1"]) == {"w1": 2}
        known.add("w1", 2, limits())
        assert known.believed(prompt(*range(9)), ["w1"]) == {}
        known.note("w1", 1, prompt(*range(9)))
        known.remove("w1", 1)
        known.note("w1", 2, prompt(*range(9)))
        assert known.believed(prompt(*range(9)), ["w1"]) == {"w1": 2}
        known.remove("w1", 2)
        assert known.believed(prompt(*range(9)), ["w1"]) == {}

    def test_no_more_is_believed_than_the_pool_holds_and_the_longest_unused_goes_first(self) -> None:
        known = prefixes("w1", num_blocks=4)
        old, shared, new = prompt(1, *range(8)), prompt(2, *range(8)), prompt(3, *range(8))
        known.note("w1", 1, old)
        known.note("w1", 1, shared)
        known.note("w1", 1, old)
        known.note("w1", 1, new)
        assert [known.believed(it, ["w1"]).get("w1", 0) for it in (old, shared, new)] == [2, 0, 2]

    def test_a_tail_goes_before_its_head(self) -> None:
        known = prefixes("w1", num_blocks=5)
        long = prompt(*range(17))
        known.note("w1", 1, long)
        known.note("w1", 1, prompt(7, *range(8)))
        assert known.believed(long, ["w1"]) == {"w1": 3}

    def test_a_worker_that_finds_less_has_evicted_all_that_is_as_old(self) -> None:
        known = prefixes("w1")
        older, missed, newer = (prompt(number, *range(8)) for number in range(3))
        for it in (older, missed, newer):
            known.note("w1", 1, it)
        belief = known.note("w1", 1, missed)
        assert belief.num_blocks == 2
        known.correct(belief, BLOCK_SIZE)
        assert [known.believed(it, ["w1"]).get("w1", 0) for it in (older, missed, newer)] == [0, 2, 2]

    def test_a_worker_that_finds_what_was_believed_changes_nothing(self) -> None:
        known = prefixes("w1")
        for it in (older := prompt(0, *range(8)), again := prompt(1, *range(8))):
            known.note("w1", 1, it)
        known.correct(known.note("w1", 1, again), 2 * BLOCK_SIZE)
        assert known.believed(older, ["w1"]) == {"w1": 2}

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(0, 6)), max_size=30))
    def test_it_agrees_with_a_cache_that_evicts_by_last_use(self, sent: list[tuple[list[int], int]]) -> None:
        """The worker gets only what is noted, so nothing less than what is believed is ever there."""
        known, cached = prefixes("w1", num_blocks=6), OrderedDict[tuple[int, ...], None]()
        for token_ids, _ in sent:
            blocks = [tuple(token_ids[: BLOCK_SIZE * (i + 1)]) for i in range((len(token_ids) - 1) // BLOCK_SIZE)]
            found = next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))
            belief = known.note("w1", 1, Prefix(token_ids, ""))
            assert belief.num_blocks == found
            for block in reversed(blocks):
                cached[block] = None
                cached.move_to_end(block)
            while len(cached) > 6:
                cached.popitem(last=False)
