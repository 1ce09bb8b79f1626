"""Which blocks a request gets: prefix hits, promises, new blocks, publication, return. All of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from common.window import UNBOUNDED, Window, Windows, max_tokens
from worker.cache.block import Block, DigestFunction
from worker.cache.host import HostHit, HostTier
from worker.cache.pool import BlockCounts, BlockPool, IntegrityError
from worker.cache.prefix import Hit, PrefixSearch
from worker.engine.request import Request

HOLE = 0
"""What stands in a block table for a block that was given back: the null block, which nobody reads."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What holds for all requests that see the same."""

    windows: Windows
    most_blocks: tuple[int, ...]  # of each table that a request holds at a time
    max_tokens: int  # of one request that fit into the whole pool, one after the other where there is a window

    @property
    def is_windowed(self) -> bool:
        """Whether blocks leave a window."""
        return any(window is not None for window in self.windows)


class CacheManager:
    """Fills the block tables of requests from a pool; holds no request itself.

    An admission promises blocks; they stay in the pool, free or cached, until the step that fills them takes them.
    Promises never exceed the free blocks, so whoever has one can take it whatever the others do.

    Every block of tokens has one block of the pool in each block table. All tables of a request are equally long; where
    its layers have a window, what left it is a hole.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        digest: DigestFunction,
        *,
        prefix_cache: bool = True,
        windows: Windows = (None,),
        max_chunk_tokens: int = 1,
        host: HostTier | None = None,
    ) -> None:
        """`block_size` tokens per block, at least 1; `digest` chains the prefix cache's keys.

        `windows`: what the layers of each block table see of a request that does not say otherwise. Behind a window
        blocks are given back, and a request holds no more than it needs to compute `max_chunk_tokens` in a step; in a
        smaller pool its chunks are smaller. `host`, if any, keeps what preempted requests had computed; it needs the
        prefix cache.
        """
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, at least 1 is needed")
        if host is not None and not prefix_cache:
            raise ValueError("blocks in host memory are found through the prefix cache, which is off")
        self.host = host
        self.windows = windows
        self.num_tables = len(windows)
        self._max_chunk_tokens = max_chunk_tokens
        self._bounds_of = lru_cache(maxsize=1024)(self._make_bounds)
        self._is_windowed = any(windows)
        self.pool = pool
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._prefixes = PrefixSearch(pool, host, digest, block_size, len(windows))
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

    def max_tokens(self, windows: Windows = ()) -> int:
        """Tokens of one request whose KV fits into the whole pool, one after the other where there is a window.
        Without `windows`, of one that sees what the model sees."""
        return self._bounds_of(windows or self.windows).max_tokens

    def blocks_for(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request holds at a time, with so many tokens."""
        return self._num_held(request, (), num_tokens)

    def can_ever_fit(self, request: Request) -> bool:
        """Whether the KV of its tokens fits into the pool when nobody else is there."""
        return request.num_tokens <= self.max_tokens(request.windows)

    def sees_all(self, request: Request) -> bool:
        """Whether every token of it sees all before it, in every layer."""
        return not request.windows and not self._is_windowed

    def num_seen(self, request: Request, num_tokens: int) -> float:
        """Tokens that the last of so many sees, as a mean over the block tables."""
        seen = (num_tokens if it is None else min(num_tokens, it.num_seen) for it in request.windows or self.windows)
        return sum(seen) / self.num_tables

    def num_needed(self, request: Request, num_tokens: int) -> int:
        """Available blocks that an admission which covers so many tokens would need. Changes nothing but the keys."""
        hits = self._find_prefix(request)
        shared = sum(isinstance(hit, Block) and hit.ref_count > 0 for hit in hits)
        return self._num_held(request, hits, num_tokens) - shared

    def num_freed(self, request: Request) -> int:
        """Blocks that become available if this request gives back what it holds and was promised."""
        blocks = self.pool.blocks
        return request.num_promised + sum(blocks[block_id].ref_count == 1 for block_id in request.block_ids)

    def admit(self, request: Request, *, headroom: int = 0) -> bool:
        """Promises a request without blocks all blocks for its known tokens, if `headroom` more are available.

        Leading full blocks that are cached are shared and count as computed; at least one token is left to compute.
        Returns whether it did; if not, nothing has changed. With a window it is as many blocks as it may hold at a
        time, and `slide` moves them on.
        """
        assert not request.block_ids
        hits = self._find_prefix(request)
        found = [hit for hit in hits if isinstance(hit, Block)]
        saved = [hit for hit in hits if isinstance(hit, HostHit)]
        num_new = self._num_held(request, hits, request.num_tokens) - len(found)
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
        request.num_reserved = request.num_tokens
        request.num_published = len(hits) // self.num_tables
        request.num_computed = request.num_published * self.block_size
        request.num_holes = hits.count(None)
        request.num_shared_blocks = len(found) - num_revived
        if self.host is not None and request.num_preemptions:
            self.host.release(request.arrival)
        return True

    def has_run(self, request: Request, num_tokens: int) -> bool:
        """Whether `admit_run` would do it. Changes nothing."""
        num_blocks = self.blocks_for(request, num_tokens)
        if num_blocks > self.num_available:
            return False
        return not self.sees_all(request) or self.pool.find_run(num_blocks) is not None

    def admit_run(self, request: Request, num_tokens: int) -> bool:
        """Gives a request without blocks adjacent ones for so many tokens, known and to be generated, where they first
        fit; returns whether it did. Nothing cached is looked for. Behind a window, where blocks come and go, they may
        lie anywhere, and it is as many as the request holds at a time."""
        assert not request.block_ids
        assert self.host is None, "blocks are taken without a look at what must be saved of them"
        num_blocks = self.blocks_for(request, num_tokens)
        if num_blocks > self.num_available:
            return False
        if self.sees_all(request):
            start = self.pool.find_run(num_blocks)
            if start is None:
                return False
            request.block_ids = [block.block_id for block in self.pool.take_run(start, num_blocks)]
        else:
            self._promise(request, num_blocks)
            self.cover(request, num_tokens)
        request.num_reserved = num_tokens
        return True

    def slide(self, requests: Iterable[Request]) -> None:
        """Takes back the blocks that no token sees any more, the farthest first, and promises as many for what was
        reserved at admission. To be called between steps, before blocks are asked for."""
        for request in requests if self._is_windowed else [it for it in requests if it.windows]:
            windows = request.windows or self.windows
            for table, window in enumerate(windows):
                if window is not None:
                    self._slide_table(request, table, window)
            num_wanted = self._num_held(request, request.block_ids, request.num_reserved)
            num_held = len(request.block_ids) - request.num_holes + request.num_promised
            self._promise(request, max(0, min(num_wanted - num_held, self.num_available)))

    def _slide_table(self, request: Request, table: int, window: Window) -> None:
        """Gives back what left the window of a table."""
        block_ids, step = request.block_ids, self.num_tables
        start = window.num_sink_blocks(self.block_size)
        end = min(len(block_ids) // step, window.first_block(request.num_computed, self.block_size))
        first = end  # of those that were not given back yet
        while first > start and block_ids[(first - 1) * step + table] != HOLE:
            first -= 1
        for place in range(first * step + table, end * step, step):
            self.pool.release(block_ids[place])
            if request.num_shared_blocks and self.pool.blocks[block_ids[place]].ref_count:
                request.num_shared_blocks -= 1
            block_ids[place] = HOLE
            request.num_holes += 1

    def secure(self, request: Request) -> bool:
        """Sees to it that the request has a block for each table that it can take; returns whether there were."""
        num_missing = self.num_tables - request.num_promised
        if num_missing > 0:
            if self.num_available < num_missing:
                return False
            self._promise(request, num_missing)
        return True

    def grow(self, request: Request) -> bool:
        """Takes one more block for each table, a promised or an available one; returns whether there were."""
        if not self.secure(request):
            return False
        self._promise(request, -self.num_tables)
        request.block_ids += [self._take() for _ in range(self.num_tables)]
        return True

    def cover(self, request: Request, num_tokens: int) -> int:
        """Takes what the first `num_tokens` tokens need of the promised blocks; returns how many tokens the blocks
        cover then."""
        num_covered = len(request.block_ids) // self.num_tables
        num_wanted = -(-num_tokens // self.block_size)
        bounds = self._bounds_of(request.windows or self.windows)
        for most, window in zip(bounds.most_blocks, bounds.windows, strict=True):
            num_wanted = min(num_wanted, most + self._num_holes(window, request.num_computed, num_covered))
        count = min(num_wanted - num_covered, request.num_promised // self.num_tables) * self.num_tables
        if count > 0:
            self._promise(request, -count)
            request.block_ids += [self._take() for _ in range(count)]
        return len(request.block_ids) // self.num_tables * self.block_size

    def publish(self, request: Request) -> None:
        """Makes the blocks that the last step filled hittable. To be called after that step only."""
        if not self._prefix_cache:
            return
        num_full = request.num_computed // self.block_size
        for index in range(request.num_published, num_full):
            for table in range(self.num_tables):
                block_id = request.block_ids[index * self.num_tables + table]
                self.pool.publish(block_id, self._prefixes.key(request, index, table))
        request.num_published = num_full

    def keep(self, request: Request, recompute_s: Callable[[int, int], float]) -> None:
        """Claims the host's memory for what a request that is about to be preempted has in blocks of its own, if that
        is worth it; `recompute_s` tells what it takes to compute (start, count) tokens again."""
        if self.host is None:
            return
        num_published = request.num_published * self.num_tables
        blocks = [self.pool.blocks[block_id] for block_id in request.block_ids[:num_published]]
        first = next((index for index, block in enumerate(blocks) if block.ref_count == 1), len(blocks))
        start = first // self.num_tables * self.block_size
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

    def _num_held(self, request: Request, blocks: Sequence[object], num_tokens: int) -> int:
        """Blocks that a request holds at a time at most from now on, until its blocks cover so many tokens. `blocks`:
        its block tables, or what they will begin with."""
        bounds = self._bounds_of(request.windows or self.windows)
        num_blocks = -(-num_tokens // self.block_size)
        if not bounds.is_windowed:
            return num_blocks * self.num_tables
        num_known = len(blocks) // self.num_tables
        num_computed = request.num_computed if request.block_ids else num_known * self.block_size
        num_held = 0
        for most, window in zip(bounds.most_blocks, bounds.windows, strict=True):
            num_holes = self._num_holes(window, num_computed, num_known)
            num_held += max(0, min(num_blocks - num_holes, most))
        return min(num_held, self.pool.num_usable)

    def _num_holes(self, window: Window | None, num_computed: int, num_blocks: int) -> int:
        """Of so many blocks of a table, those that nobody sees any more once so many tokens are computed."""
        if window is None:
            return 0
        end = min(num_blocks, window.first_block(num_computed, self.block_size))
        return max(0, end - window.num_sink_blocks(self.block_size))

    def _find_prefix(self, request: Request) -> Sequence[Hit]:
        """See PrefixSearch.find; nothing if there is no prefix cache."""
        return self._prefixes.find(request, request.windows or self.windows) if self._prefix_cache else ()

    def _make_bounds(self, windows: Windows) -> _Bounds:
        most = (
            UNBOUNDED if window is None else window.max_blocks(self._max_chunk_tokens, self.block_size)
            for window in windows
        )
        return _Bounds(windows, tuple(most), max_tokens(windows, self.pool.num_usable, self.block_size))
