"""Which blocks of a request's beginning are known already, in every block table, and under which keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.window import Window, Windows
from worker.cache.block import Block, BlockKey, DigestFunction, first_parent, pack_tokens
from worker.cache.host import HostHit, HostTier
from worker.cache.pool import BlockPool
from worker.engine.request import Request

Hit = Block | HostHit | None
"""A block of a known prefix: in the pool, in the host, or one that no later token sees, wherever it is."""


class PrefixSearch:
    """Looks in the pool, then in the host; takes nothing. `num_tables` block tables have blocks of their own."""

    def __init__(
        self, pool: BlockPool, host: HostTier | None, digest: DigestFunction, block_size: int, num_tables: int
    ) -> None:
        self._pool = pool
        self._host = host
        self._digest = digest
        self._block_size = block_size
        self._num_tables = num_tables

    def key(self, request: Request, index: int, table: int = 0) -> BlockKey:
        """The key of a request's full block in a table; made once, in order, as tokens never change."""
        keys = request.block_keys
        while len(keys) <= index * self._num_tables + table:
            start = len(keys) // self._num_tables * self._block_size
            tokens = pack_tokens(request.token_ids[start : start + self._block_size])
            parent = keys[-1].digest if keys else first_parent(request.cache_salt)
            digest = self._digest(parent, tokens)
            keys += [BlockKey(digest, request.cache_salt, tokens, each) for each in range(self._num_tables)]
        return keys[index * self._num_tables + table]

    def find(self, request: Request, windows: Windows) -> Sequence[Hit]:
        """The blocks of the longest known prefix that leaves a token to compute, for every block one of each table;
        None for those of it that no later token sees, cached or not."""
        num_blocks = (request.num_tokens - 1) // self._block_size
        if windows == (None,):
            return self._find_from_start(request, num_blocks)
        end, found = num_blocks, dict[BlockKey, Block | HostHit]()
        while end:
            missing = self._find_missing(request, windows, end, found)
            if missing is None:
                break
            end = missing
        places = ((index, table) for index in range(end) for table in range(self._num_tables))
        needed = [set(self._needed(window, end)) for window in windows]
        return [found[self.key(request, *place)] if place[0] in needed[place[1]] else None for place in places]

    def _find(self, key: BlockKey) -> Block | HostHit | None:
        block = self._pool.find(key)
        return block if block is not None or self._host is None else self._host.find(key)

    def _find_from_start(self, request: Request, num_blocks: int) -> list[Hit]:
        """Up to so many blocks of the only table, until one is not cached."""
        hits: list[Hit] = []
        for index in range(num_blocks):
            hit = self._find(self.key(request, index))
            if hit is None:
                break
            hits.append(hit)
        return hits

    def _find_missing(
        self, request: Request, windows: Windows, end: int, found: dict[BlockKey, Block | HostHit]
    ) -> int | None:
        """A block that a prefix of `end` blocks needs and that is missing in a table; a longer one that ends behind
        that block, and no later than here, needs it, too. None if all are there; then they are in `found`."""
        for table, window in enumerate(windows):
            for index in self._needed(window, end):
                key = self.key(request, index, table)
                if key in found:
                    continue
                hit = self._find(key)
                if hit is None:
                    return index
                found[key] = hit
        return None

    def _needed(self, window: Window | None, end: int) -> Iterator[int]:
        """Blocks of a prefix of `end` blocks that a later token sees: a window's from its end, then those from the
        start."""
        num_from_start = end
        if window is not None:
            yield from range(end - 1, window.first_block(end * self._block_size, self._block_size) - 1, -1)
            num_from_start = min(end, window.num_sink_blocks(self._block_size))
        yield from range(num_from_start)
