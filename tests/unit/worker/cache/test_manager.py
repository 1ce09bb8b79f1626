"""The cache manager: what is hit, what an admission costs, and that a refused one changes nothing."""

from __future__ import annotations

import pytest

from common.types import Band, SamplingParams
from worker.cache.block import DigestFunction, first_parent, keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.request import Request

BLOCK_SIZE = 4


def make_manager(num_blocks: int, digest: DigestFunction | None = None, *, prefix_cache: bool = True) -> CacheManager:
    digest = digest or keyed_digest(b"test")
    return CacheManager(BlockPool(num_blocks + 1), BLOCK_SIZE, digest, prefix_cache=prefix_cache)


def make_request(token_ids: list[int], salt: str = "") -> Request:
    sampling = SamplingParams(seed=0, max_tokens=8)
    return Request("r", 1, 1, list(token_ids), len(token_ids), sampling, Band.NORMAL, salt, arrival=1)


def compute(manager: CacheManager, request: Request, num_tokens: int | None = None) -> None:
    """As a step would, up to so many tokens."""
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    assert manager.cover(request, num_tokens) >= num_tokens
    request.num_computed = num_tokens
    manager.publish(request)


def run_once(manager: CacheManager, token_ids: list[int], salt: str = "") -> Request:
    request = make_request(token_ids, salt)
    assert manager.admit(request)
    compute(manager, request)
    manager.free(request)
    return request


def hit_tokens(manager: CacheManager, token_ids: list[int], salt: str = "") -> int:
    request = make_request(token_ids, salt)
    assert manager.admit(request)
    hit = request.num_computed
    manager.free(request)
    return hit


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CacheManager(BlockPool(2), 0, keyed_digest(b""))


@pytest.mark.parametrize("length", range(1, 3 * BLOCK_SIZE + 2))
def test_the_same_prompt_again_hits_all_full_blocks_but_leaves_a_token(length: int) -> None:
    manager = make_manager(8)
    token_ids = list(range(length))
    run_once(manager, token_ids)
    assert hit_tokens(manager, token_ids) == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("length", range(1, 3 * BLOCK_SIZE + 2))
def test_a_prompt_continued_hits_every_full_block_of_it(length: int) -> None:
    manager = make_manager(8)
    token_ids = list(range(length))
    run_once(manager, token_ids)
    assert hit_tokens(manager, [*token_ids, 99]) == length // BLOCK_SIZE * BLOCK_SIZE


def test_a_difference_in_the_first_block_spoils_the_second() -> None:
    manager = make_manager(8)
    run_once(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert hit_tokens(manager, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert hit_tokens(manager, [1, 2, 3, 4, 0, 6, 7, 8, 9]) == BLOCK_SIZE


def test_another_salt_never_hits() -> None:
    manager = make_manager(8)
    token_ids = list(range(9))
    run_once(manager, token_ids, "acme")
    assert hit_tokens(manager, token_ids, "evil") == 0
    assert hit_tokens(manager, token_ids, "acme") == 8


def test_colliding_digests_do_not_hit_other_tokens_or_another_salt() -> None:
    manager = make_manager(8, lambda parent, content: b"the same digest!")
    run_once(manager, [1, 2, 3, 4, 5], "acme")
    assert hit_tokens(manager, [6, 7, 8, 9, 10], "acme") == 0
    assert hit_tokens(manager, [1, 2, 3, 4, 5], "evil") == 0


def test_digests_depend_on_secret_parent_and_content_and_a_salt_is_no_block() -> None:
    one, other = keyed_digest(b"one"), keyed_digest(b"other")
    parent = first_parent("salt")
    digests = [
        one(parent, b"x"),
        other(parent, b"x"),
        one(b"p" * 16, b"x"),
        one(parent, b"y"),
        parent,
        first_parent(""),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {16}


def test_a_block_is_not_hittable_before_the_step_that_fills_it() -> None:
    manager = make_manager(8)
    first, second = make_request(list(range(9))), make_request(list(range(9)))
    assert manager.admit(first)
    assert manager.admit(second)
    assert second.num_computed == 0
    compute(manager, first, 6)
    assert hit_tokens(manager, list(range(9))) == BLOCK_SIZE
    compute(manager, first, 8)
    assert hit_tokens(manager, list(range(9))) == 2 * BLOCK_SIZE


def test_blocks_of_an_interrupted_prefill_are_hittable_only_where_complete() -> None:
    manager = make_manager(8)
    request = make_request(list(range(12)))
    assert manager.admit(request)
    compute(manager, request, 7)
    manager.free(request)
    assert hit_tokens(manager, list(range(12))) == BLOCK_SIZE


@pytest.mark.parametrize(("num_free", "fits"), [(2, False), (3, True), (4, True)])
def test_admission_takes_exactly_the_blocks_needed(num_free: int, fits: bool) -> None:
    manager = make_manager(num_free)
    request = make_request(list(range(3 * BLOCK_SIZE)))
    assert manager.admit(request) is fits
    assert manager.num_available == (num_free - 3 if fits else num_free)
    manager.check_integrity([request])


def test_headroom_must_stay_free_after_admission() -> None:
    request = make_request(list(range(3 * BLOCK_SIZE)))
    assert not make_manager(4).admit(request, headroom=2)
    assert make_manager(4).admit(request, headroom=1)


def test_a_hit_on_a_cached_block_counts_against_the_free_blocks() -> None:
    manager = make_manager(4)
    run_once(manager, list(range(8)))
    holder = make_request([50] * 8)
    assert manager.admit(holder)
    assert manager.num_available == 2
    request = make_request([*range(8), *range(90, 95)])  # two hits, both in the free list, and two more blocks
    assert not manager.admit(request)
    assert (request.block_ids, request.num_computed, request.num_published) == ([], 0, 0)
    assert manager.num_available == 2
    manager.check_integrity([holder, request])
    assert hit_tokens(manager, [*range(8), 99][:8]) == BLOCK_SIZE, "the refused admission evicted nothing"


def test_a_hit_is_never_evicted_by_its_own_admission() -> None:
    manager = make_manager(4)
    run_once(manager, list(range(8)))
    run_once(manager, [50] * 8)
    request = make_request([*range(8), *range(90, 98)])
    assert manager.admit(request)
    assert request.num_computed == 8
    assert manager.cover(request, 16) == 16
    assert len(set(request.block_ids)) == 4
    manager.check_integrity([request])


def test_a_refusal_leaves_no_stale_hit_when_the_prefix_is_gone_at_the_next_try() -> None:
    manager = make_manager(4)
    run_once(manager, list(range(8)))
    holder = make_request([50] * 8)
    assert manager.admit(holder)
    request = make_request([*range(8), *range(90, 95)])
    assert not manager.admit(request)
    compute(manager, holder)
    run_once(manager, [60] * 8)  # evicts the prefix
    manager.free(holder)
    assert manager.admit(request)
    assert request.num_computed == 0


def test_the_tail_of_a_freed_prefix_is_evicted_before_its_head() -> None:
    manager = make_manager(4)
    run_once(manager, list(range(16)))
    run_once(manager, [50] * 8)
    assert hit_tokens(manager, [*range(8), 99]) == 8


def test_growing_fails_without_a_free_block_and_changes_nothing() -> None:
    manager = make_manager(2)
    request = make_request([1, 2, 3, 4])
    assert manager.admit(request)
    assert manager.grow(request)
    assert manager.grow(request)
    assert not manager.grow(request)
    assert len(request.block_ids) == 2
    manager.check_integrity([request])


def test_blocks_are_taken_as_they_are_needed_and_promised_from_the_start() -> None:
    manager = make_manager(5)
    request, other = make_request(list(range(18))), make_request([50] * 4)
    assert manager.admit(request)
    assert (request.num_promised, manager.num_available, manager.pool.num_free) == (5, 0, 5)
    assert not manager.admit(other), "free, but promised"
    assert not manager.secure(other)
    assert manager.cover(request, 1) == manager.cover(request, BLOCK_SIZE) == BLOCK_SIZE
    assert manager.cover(request, BLOCK_SIZE + 1) == 2 * BLOCK_SIZE
    assert (request.num_promised, manager.counts.referenced) == (3, 2)
    manager.check_integrity([request, other])
    assert manager.cover(request, 99) == 5 * BLOCK_SIZE, "no more than was promised"
    manager.free(request)
    assert (request.num_promised, manager.num_available) == (0, 5)
    manager.check_integrity([request, other])


def test_a_run_is_adjacent_and_lies_where_it_first_fits() -> None:
    manager = make_manager(10, prefix_cache=False)
    first, second, third = (make_request([token] * 6) for token in range(3))
    assert manager.admit_run(first, 9)
    assert manager.admit_run(second, 12)
    assert manager.admit_run(third, 5)
    assert (first.block_ids, second.block_ids, third.block_ids) == ([1, 2, 3], [4, 5, 6], [7, 8])
    assert (first.num_promised, manager.num_available) == (0, 2)
    manager.free(second)
    fourth = make_request([4] * 6)
    assert manager.num_available == 5, "but in gaps of three and two"
    assert not manager.has_run(fourth, 13)
    assert not manager.admit_run(fourth, 13)
    assert fourth.block_ids == []
    assert manager.has_run(fourth, 12)
    assert manager.admit_run(fourth, 7)
    assert fourth.block_ids == [4, 5]
    manager.check_integrity([first, second, third, fourth])


def test_a_promised_block_stays_hittable_until_it_is_taken_and_is_not_taken_twice() -> None:
    manager = make_manager(4)
    run_once(manager, list(range(8)))
    request = make_request([50] * 16)
    assert manager.admit(request)  # all four blocks, of which two hold the cached prefix
    again = make_request([*range(8), 99])
    assert not manager.admit(again), "what it would find is promised"
    assert manager.cover(request, 16) == 16
    manager.check_integrity([request, again])


def test_counts_with_promises_take_the_empty_blocks_first_and_sum_to_the_pool() -> None:
    manager = make_manager(4)
    run_once(manager, list(range(8)))
    request = make_request([50] * 12)
    assert manager.admit(request)
    counts = manager.counts_with_promises
    assert (counts.empty, counts.cached, counts.referenced, counts.total) == (0, 1, 3, 5)
    assert (manager.counts.empty, manager.counts.cached, manager.counts.referenced) == (2, 2, 0)


def test_without_a_prefix_cache_nothing_is_ever_hit() -> None:
    manager = make_manager(8, prefix_cache=False)
    run_once(manager, list(range(9)))
    assert hit_tokens(manager, list(range(9))) == 0
    assert manager.counts.cached == 0


def test_what_can_ever_fit_leaves_out_the_null_block() -> None:
    manager = make_manager(3)
    assert manager.max_tokens() == 3 * BLOCK_SIZE
