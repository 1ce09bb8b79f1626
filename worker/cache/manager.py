"""Which blocks a request gets: prefix hits, new blocks, publication, return. All of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable

from worker.cache.block import Block, BlockKey, DigestFunction, first_parent, pack_tokens
from worker.cache.pool import BlockCounts, BlockPool
from worker.engine.request import Request


class CacheManager:
    """Fills the block tables of requests from a pool; holds no request itself."""

    def __init__(self, pool: BlockPool, block_size: int, digest: DigestFunction, *, prefix_cache: bool = True) -> None:
        """`block_size` tokens per block, at least 1; `digest` chains the prefix cache's keys."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, at least 1 is needed")
        self.pool = pool
        self.block_size = block_size
        self._digest = digest
        self._prefix_cache = prefix_cache

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        return self.pool.counts

    @property
    def max_tokens(self) -> int:
        """Tokens of one request whose KV fits into the whole pool."""
        return self.pool.num_usable * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the KV of so many tokens fits into the pool when nobody else is there."""
        return num_tokens <= self.max_tokens

    def num_needed(self, request: Request, num_tokens: int) -> int:
        """Free blocks that an admission which covers so many tokens would take. Changes nothing but the keys."""
        shared = sum(block.ref_count > 0 for block in self._find_prefix(request))
        return self.blocks_for(num_tokens) - shared

    def num_freed(self, request: Request) -> int:
        """Blocks that come free if this request gives back what it holds."""
        blocks = self.pool.blocks
        return sum(blocks[block_id].ref_count == 1 for block_id in request.block_ids)

    def admit(self, request: Request, *, num_tokens: int | None = None, headroom: int = 0) -> bool:
        """Gives a request without blocks all blocks for its known tokens, if `headroom` blocks stay free after that.

        `num_tokens`, if given, covers more: tokens that it will generate. Leading full blocks that are cached are
        shared and count as computed; at least one token is left to compute. Returns whether it did; if not, nothing
        has changed.
        """
        assert not request.block_ids
        hits = self._find_prefix(request)
        num_new = self.blocks_for(max(request.num_tokens, num_tokens or 0)) - len(hits)
        num_revived = sum(block.ref_count == 0 for block in hits)  # they leave the free list as well
        if num_new + num_revived + headroom > self.pool.num_free:
            return False
        for block in hits:  # before taking, which could evict them
            self.pool.touch(block)
        taken = [self.pool.take() for _ in range(num_new)]
        request.block_ids = [block.block_id for block in (*hits, *taken)]
        request.num_computed = len(hits) * self.block_size
        request.num_published = len(hits)
        request.num_shared_blocks = len(hits) - num_revived
        return True

    def grow(self, request: Request) -> bool:
        """Gives one more block; returns whether there was one."""
        if not self.pool.num_free:
            return False
        request.block_ids.append(self.pool.take().block_id)
        return True

    def publish(self, request: Request) -> None:
        """Makes the blocks that the last step filled hittable. To be called after that step only."""
        if not self._prefix_cache:
            return
        num_full = request.num_computed // self.block_size
        for index in range(request.num_published, num_full):
            self.pool.publish(request.block_ids[index], self._key(request, index))
        request.num_published = num_full

    def free(self, request: Request) -> None:
        """Gives all blocks back, the last first: the tail of a prefix is evicted before its head."""
        for block_id in reversed(request.block_ids):
            self.pool.release(block_id)
        request.block_ids = []
        request.num_computed = 0
        request.num_published = 0
        request.num_shared_blocks = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Audits the pool against the tables of all requests. Raises IntegrityError with what is wrong."""
        self.pool.check_integrity([request.block_ids for request in requests])

    def _find_prefix(self, request: Request) -> list[Block]:
        """The cached blocks of the longest known prefix that leaves a token to compute."""
        hits: list[Block] = []
        if not self._prefix_cache:
            return hits
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.find(self._key(request, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def _key(self, request: Request, index: int) -> BlockKey:
        """The key of a request's full block; made once, in order, as tokens never change."""
        keys = request.block_keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            tokens = pack_tokens(request.token_ids[start : start + self.block_size])
            parent = keys[-1].digest if keys else first_parent(request.cache_salt)
            keys.append(BlockKey(self._digest(parent, tokens), request.cache_salt, tokens))
        return keys[index]
