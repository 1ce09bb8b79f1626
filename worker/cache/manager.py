"""Which blocks a request gets: prefix hits, promises, new blocks, publication, return. All of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common.window import Window
from worker.cache.block import Block, BlockKey, DigestFunction, first_parent, pack_tokens
from worker.cache.host import HostHit, HostTier
from worker.cache.pool import BlockCounts, BlockPool, IntegrityError
from worker.engine.request import Request

UNBOUNDED = 1 << 62
"""More tokens than anybody has."""

Hit = Block | HostHit | None
"""A block of a known prefix: in the pool, in the host, or one that no later token sees, wherever it is."""

HOLE = 0
"""What stands in a block table for a block that was given back: the null block, which nobody reads."""


class CacheManager:
    """Fills the block tables of requests from a pool; holds no request itself.

    An admission promises blocks; they stay in the pool, free or cached, until the step that fills them takes them.
    Promises never exceed the free blocks, so whoever has one can take it whatever the others do.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        digest: DigestFunction,
        *,
        prefix_cache: bool = True,
        window: Window | None = None,
        max_chunk_tokens: int = 1,
        host: HostTier | None = None,
    ) -> None:
        """`block_size` tokens per block, at least 1; `digest` chains the prefix cache's keys.

        With a `window`, blocks behind it are given back, and a request holds no more than it needs to compute
        `max_chunk_tokens` in a step; in a smaller pool its chunks are smaller. `host`, if any, keeps what preempted
        requests had computed; it needs the prefix cache.
        """
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, at least 1 is needed")
        if host is not None and not prefix_cache:
            raise ValueError("blocks in host memory are found through the prefix cache, which is off")
        self.host = host
        self._window = window
        self._most_blocks = UNBOUNDED  # that one request holds at a time
        self._is_unbounded = False  # whether requests of any length fit
        if window is not None:
            self._most_blocks = min(window.max_blocks(max_chunk_tokens, block_size), pool.num_usable)
            self._is_unbounded = window.max_blocks(1, block_size) <= pool.num_usable
        self.pool = pool
        self.block_size = block_size
        self._digest = digest
        self._prefix_cache = prefix_cache
        self.num_promised = 0
        """Free blocks that requests may take yet: the sum over all of them."""

    @property
    def num_available(self) -> int:
        """Blocks that are free and promised to nobody."""
        return self.pool.num_free - self.num_promised

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        return self.pool.counts

    @property
    def counts_with_promises(self) -> BlockCounts:
        """Blocks by state as if all promises were taken: of the empty ones, then of the cached, then of the others."""
        counts, left = self.counts, self.num_promised
        empty = min(left, counts.empty)
        cached = min(left - empty, counts.cached)
        return BlockCounts(
            counts.empty - empty,
            counts.cached - cached,
            counts.referenced + left,
            counts.swapping - (left - empty - cached),
            counts.null,
        )

    @property
    def max_tokens(self) -> int:
        """Tokens of one request whose KV fits into the whole pool, one after the other if there is a window."""
        return UNBOUNDED if self._is_unbounded else self.pool.num_usable * self.block_size

    @property
    def max_held_tokens(self) -> int:
        """Tokens in the blocks that one request holds at a time."""
        return self._most_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds at a time."""
        return min(-(-num_tokens // self.block_size), self._most_blocks)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the KV of so many tokens fits into the pool when nobody else is there."""
        return num_tokens <= self.max_tokens

    def num_needed(self, request: Request, num_tokens: int) -> int:
        """Available blocks that an admission which covers so many tokens would need. Changes nothing but the keys."""
        hits = self._find_prefix(request)
        shared = sum(isinstance(hit, Block) and hit.ref_count > 0 for hit in hits)
        return self._num_held(hits, num_tokens) - shared

    def num_freed(self, request: Request) -> int:
        """Blocks that become available if this request gives back what it holds and was promised."""
        blocks = self.pool.blocks
        return request.num_promised + sum(blocks[block_id].ref_count == 1 for block_id in request.block_ids)

    def admit(self, request: Request, *, num_tokens: int | None = None, headroom: int = 0) -> bool:
        """Promises a request without blocks all blocks for its known tokens, if `headroom` more are available.

        With `num_tokens` it takes all blocks for so many tokens at once: also for those that it will generate. Leading
        full blocks that are cached are shared and count as computed; at least one token is left to compute. Returns
        whether it did; if not, nothing has changed. With a window it is as many blocks as it may hold at a time, and
        `slide` moves them on.
        """
        assert not request.block_ids
        hits = self._find_prefix(request)
        found = [hit for hit in hits if isinstance(hit, Block)]
        saved = [hit for hit in hits if isinstance(hit, HostHit)]
        num_reserved = max(request.num_tokens, num_tokens or 0)
        num_new = self._num_held(hits, num_reserved) - len(found)
        num_revived = sum(block.ref_count == 0 for block in found)  # they leave the free list as well
        if num_new + num_revived + headroom > self.num_available:
            return False
        for block in found:  # before taking, which could evict them
            self.pool.touch(block)
        if self.host is not None:
            self.host.hold(saved)
        for hit in hits:
            request.block_ids.append(self._place(hit))
        self._promise(request, num_new - len(saved))
        if num_tokens is not None:
            self.cover(request, num_tokens)
        request.num_reserved = num_reserved
        request.num_computed = len(hits) * self.block_size
        request.num_published = len(hits)
        request.num_holes = hits.count(None)
        request.num_shared_blocks = len(found) - num_revived
        if self.host is not None and request.num_preemptions:
            self.host.release(request.arrival)
        return True

    def slide(self, requests: Iterable[Request]) -> None:
        """Takes back the blocks that no token sees any more, the farthest first, and promises as many for what was
        reserved at admission. To be called between steps, before blocks are asked for."""
        if self._window is None:
            return
        num_sink_blocks = self._window.num_sink_blocks(self.block_size)
        for request in requests:
            block_ids = request.block_ids
            start = num_sink_blocks + request.num_holes
            end = self._window.first_block(request.num_computed, self.block_size)
            for index in range(start, end):
                self.pool.release(block_ids[index])
                if request.num_shared_blocks and self.pool.blocks[block_ids[index]].ref_count:
                    request.num_shared_blocks -= 1
                block_ids[index] = HOLE
            request.num_holes += max(0, end - start)
            num_blocks = len(block_ids) + request.num_promised
            wanted = -(-request.num_reserved // self.block_size) - num_blocks
            room = self._most_blocks - (num_blocks - request.num_holes)
            self._promise(request, max(0, min(wanted, room, self.num_available)))

    def secure(self, request: Request) -> bool:
        """Sees to it that the request has a block that it can take; returns whether there was one."""
        if not request.num_promised:
            if self.num_available < 1:
                return False
            self._promise(request, 1)
        return True

    def grow(self, request: Request) -> bool:
        """Takes one more block, a promised or an available one; returns whether there was one."""
        if not self.secure(request):
            return False
        self._promise(request, -1)
        request.block_ids.append(self._take())
        return True

    def cover(self, request: Request, num_tokens: int) -> int:
        """Takes what the first `num_tokens` tokens need of the promised blocks; returns how many tokens the blocks
        cover then."""
        num_missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        count = min(num_missing, request.num_promised)
        if count > 0:
            self._promise(request, -count)
            request.block_ids += [self._take() for _ in range(count)]
        return len(request.block_ids) * self.block_size

    def publish(self, request: Request) -> None:
        """Makes the blocks that the last step filled hittable. To be called after that step only."""
        if not self._prefix_cache:
            return
        num_full = request.num_computed // self.block_size
        for index in range(request.num_published, num_full):
            self.pool.publish(request.block_ids[index], self._key(request, index))
        request.num_published = num_full

    def keep(self, request: Request, recompute_s: Callable[[int, int], float]) -> None:
        """Claims the host's memory for what a request that is about to be preempted has in blocks of its own, if that
        is worth it; `recompute_s` tells what it takes to compute (start, count) tokens again."""
        if self.host is None:
            return
        blocks = [self.pool.blocks[block_id] for block_id in request.block_ids[: request.num_published]]
        first = next((index for index, block in enumerate(blocks) if block.ref_count == 1), len(blocks))
        start = first * self.block_size
        own = [block for block in blocks[first:] if block.ref_count == 1]
        self.host.keep(request.arrival, own, recompute_s(start, request.num_computed - start))

    def forget(self, request: Request) -> None:
        """Gives up what was kept for a preempted request that will not return."""
        if self.host is not None:
            self.host.release(request.arrival)

    def free(self, request: Request) -> None:
        """Gives all blocks and promises back, the last first: the tail of a prefix is evicted before its head."""
        for block_id in reversed(request.block_ids):
            if block_id != HOLE:
                self.pool.release(block_id)
        request.block_ids = []
        self._promise(request, -request.num_promised)
        request.num_holes = 0
        request.num_reserved = 0
        request.num_computed = 0
        request.num_published = 0
        request.num_shared_blocks = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Audits the pool against the tables of all requests. Raises IntegrityError with what is wrong."""
        tables = []
        num_promised = 0
        for request in requests:
            num_promised += request.num_promised
            if request.block_ids.count(HOLE) != request.num_holes:
                raise IntegrityError(f"{request} counts {request.num_holes} holes in {request.block_ids}")
            tables.append([block_id for block_id in request.block_ids if block_id != HOLE])
        if num_promised != self.num_promised or not 0 <= num_promised <= self.pool.num_free:
            raise IntegrityError(
                f"{self.num_promised} blocks are promised, {num_promised} to requests, of {self.pool.num_free} free"
            )
        self.pool.check_integrity(tables)
        if self.host is not None:
            self.host.check_integrity()

    def _promise(self, request: Request, change: int) -> None:
        """Promises so many available blocks more to a request, or fewer."""
        request.num_promised += change
        self.num_promised += change

    def _take(self) -> int:
        """Takes a block, after whatever must be saved of it is ordered."""
        if self.host is not None:
            self.host.before_take(self.pool.next_free)
        return self.pool.take().block_id

    def _place(self, hit: Hit) -> int:
        """The block for a hit; one from the host is filled before the step, so it is hittable at once."""
        if hit is None:
            return HOLE
        if isinstance(hit, Block):
            return hit.block_id
        block_id = self._take()
        assert self.host is not None
        self.host.load(hit, block_id)
        self.pool.publish(block_id, hit.key)
        return block_id

    def _find(self, key: BlockKey) -> Block | HostHit | None:
        block = self.pool.find(key)
        return block if block is not None or self.host is None else self.host.find(key)

    def _num_held(self, hits: Sequence[Hit], num_tokens: int) -> int:
        """Blocks that an admission with these hits holds; at least one token's place is new."""
        num_holes = hits.count(None)
        return min(-(-num_tokens // self.block_size) - num_holes, self._most_blocks)

    def _find_prefix(self, request: Request) -> Sequence[Hit]:
        """The cached blocks of the longest known prefix that leaves a token to compute; None for blocks of it that no
        later token sees, cached or not."""
        if not self._prefix_cache:
            return ()
        num_blocks = (request.num_tokens - 1) // self.block_size
        return (
            self._find_from_start(request, num_blocks)
            if self._window is None
            else self._find_tail(request, num_blocks, self._window)
        )

    def _find_from_start(self, request: Request, num_blocks: int) -> list[Hit]:
        """Up to so many blocks, until one is not cached."""
        hits: list[Hit] = []
        for index in range(num_blocks):
            hit = self._find(self._key(request, index))
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _find_tail(self, request: Request, num_blocks: int, window: Window) -> list[Hit]:
        """The longest prefix, up to so many blocks, whose sinks and last window are cached; searched from its end."""
        num_sink_blocks = window.num_sink_blocks(self.block_size)
        end = num_blocks
        while end:
            first = min(end, window.first_block(end * self.block_size, self.block_size))
            tail: list[Hit] = []
            for index in range(end - 1, first - 1, -1):
                hit = self._find(self._key(request, index))
                if hit is None:
                    end = index
                    break
                tail.append(hit)
            else:
                sinks = self._find_from_start(request, min(num_sink_blocks, end))
                if len(sinks) == min(num_sink_blocks, end):
                    return [*sinks, *[None] * (first - len(sinks)), *reversed(tail)]
                end = len(sinks)
        return []

    def _key(self, request: Request, index: int) -> BlockKey:
        """The key of a request's full block; made once, in order, as tokens never change."""
        keys = request.block_keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            tokens = pack_tokens(request.token_ids[start : start + self.block_size])
            parent = keys[-1].digest if keys else first_parent(request.cache_salt)
            keys.append(BlockKey(self._digest(parent, tokens), request.cache_salt, tokens))
        return keys[index]
