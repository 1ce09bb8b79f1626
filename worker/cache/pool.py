"""The pool of KV blocks: references, the prefix cache's index, and least-recently-used eviction, each O(1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from worker.cache.block import Block, BlockKey, FreeList


class IntegrityError(Exception):
    """The books do not add up; the message says where."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the sum is the pool, always."""

    empty: int
    cached: int  # unreferenced and hittable: evictable
    referenced: int
    swapping: int
    null: int

    @property
    def total(self) -> int:
        """All blocks."""
        return self.empty + self.cached + self.referenced + self.swapping + self.null


class BlockPool:
    """Owns `num_blocks` blocks, of which block 0 is the null block: padding points there, nobody gets it.

    Equal content in two blocks is allowed while both are referenced, so that block tables only ever grow; of equal
    blocks at most one stays in the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError if not even one block is left for requests."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, the null block and one more, not {num_blocks}")
        self.blocks = tuple(Block(block_id) for block_id in range(num_blocks))
        self.num_usable = num_blocks - 1
        self._free = FreeList()
        self._index: dict[BlockKey, Block] = {}
        self._num_empty = self.num_usable
        self._num_cached = 0
        self._num_referenced = 0
        self._num_swapping = 0
        self._held = bytearray(num_blocks)  # by block id: 0 where nobody holds the block
        self._held[0] = 1
        for block in self.blocks[1:]:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: empty and cached, and swapping ones as soon as they are copied."""
        return self._num_empty + self._num_cached + self._num_swapping

    @property
    def next_free(self) -> Block:
        """The block that `take` takes next. Raises IndexError if none is free."""
        return self._free.front

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        return BlockCounts(self._num_empty, self._num_cached, self._num_referenced, self._num_swapping, null=1)

    def find(self, key: BlockKey) -> Block | None:
        """The block with this very content, referenced or cached. Changes nothing."""
        return self._index.get(key)

    def take(self) -> Block:
        """Takes an empty block, or evicts the least recently used cached one. Raises IndexError if none is free.

        The block is not being copied: whoever has blocks copied looks at `next_free` first.
        """
        return self._take(self._free.front)

    def find_run(self, num_blocks: int) -> int | None:
        """The id of the first of so many adjacent blocks that nobody holds, the lowest such place (first fit); None if
        no gap is that wide. Changes nothing."""
        start = self._held.find(bytes(num_blocks))
        return None if start < 0 else start

    def take_run(self, start: int, num_blocks: int) -> list[Block]:
        """Takes the run that `find_run` found, in order."""
        return [self._take(block) for block in self.blocks[start : start + num_blocks]]

    def _take(self, block: Block) -> Block:
        if block.is_copying:
            raise IntegrityError(f"{block} is taken while it is copied")
        self._free.remove(block)
        if block.key is None:
            self._num_empty -= 1
        else:
            self._forget(block)
            self._num_cached -= 1
        block.ref_count = 1
        self._held[block.block_id] = 1
        self._num_referenced += 1
        return block

    def touch(self, block: Block) -> None:
        """Adds a reference to a block that `find` gave, taking it out of the free list if it lay there."""
        if block.ref_count == 0:
            self._free.remove(block)
            if block.is_copying:
                self._num_swapping -= 1
            else:
                self._num_cached -= 1
            self._num_referenced += 1
            self._held[block.block_id] = 1
        block.ref_count += 1

    def begin_copy(self, block: Block) -> None:
        """Counts a block as swapping while it has no reference, until `end_copy`; its content stays as it is."""
        self._count_free(block, -1)
        block.is_copying = True
        self._count_free(block, 1)

    def end_copy(self, block: Block) -> None:
        """Counts a block by what it is again."""
        self._count_free(block, -1)
        block.is_copying = False
        self._count_free(block, 1)

    def _count_free(self, block: Block, change: int) -> None:
        """Counts a block by its state, if it is free."""
        if block.ref_count:
            return
        if block.is_copying:
            self._num_swapping += change
        elif block.key is None:
            self._num_empty += change
        else:
            self._num_cached += change

    def release(self, block_id: int) -> None:
        """Gives a reference back. The last one makes the block cached, or empty if nobody could hit it."""
        block = self.blocks[block_id]
        if block.ref_count < 1:
            raise IntegrityError(f"{block} is released and has no reference")
        block.ref_count -= 1
        if block.ref_count:
            return
        self._num_referenced -= 1
        self._held[block_id] = 0
        if block.key is not None and block.next_twin is not block:
            self._forget(block)  # a twin holds the same: no need to cache both
        if block.key is None:
            self._free.append_front(block)
        else:
            self._free.append(block)
        self._count_free(block, 1)

    def publish(self, block_id: int, key: BlockKey) -> None:
        """Makes a referenced, completely computed block hittable under `key`."""
        block = self.blocks[block_id]
        if block.ref_count < 1 or block.key is not None:
            raise IntegrityError(f"{block} is published, which needs a reference and no key")
        block.key = key
        twin = self._index.setdefault(key, block)
        if twin is not block:
            block.prev_twin, block.next_twin = twin, twin.next_twin
            twin.next_twin.prev_twin = block
            twin.next_twin = block

    def _forget(self, block: Block) -> None:
        """Takes a block's key, and the block out of the index."""
        key = block.key
        assert key is not None
        twin = block.next_twin
        if twin is block:
            del self._index[key]
        else:
            if self._index[key] is block:
                self._index[key] = twin
            twin.prev_twin, block.prev_twin.next_twin = block.prev_twin, twin
            block.prev_twin = block.next_twin = block
        block.key = None

    def check_integrity(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Audits every block, and the reference counts against all block tables if given; linear in the pool.

        Raises IntegrityError with what is wrong.
        """
        counts = self.counts
        if counts.total != len(self.blocks):
            raise IntegrityError(f"{counts} sums to {counts.total}, the pool has {len(self.blocks)} blocks")
        free = list(self._free)
        free_ids = {block.block_id for block in free}
        if len(free) != len(free_ids) or len(free) != len(self._free) or 0 in free_ids:
            raise IntegrityError(f"the free list is broken: {len(self._free)} counted, {len(free)} found: {free}")
        self._check_blocks(counts, free_ids)
        if tables is not None:
            held = Counter(block_id for table in tables for block_id in table)
            for block in self.blocks:
                if block.ref_count != held[block.block_id]:
                    raise IntegrityError(f"{block} is in {held[block.block_id]} block tables")

    def _check_blocks(self, counts: BlockCounts, free_ids: set[int]) -> None:
        seen: Counter[str] = Counter()
        for block in self.blocks[1:]:
            if (block.ref_count == 0) != (block.block_id in free_ids):
                raise IntegrityError(f"{block} is {'' if block.block_id in free_ids else 'not '}in the free list")
            if bool(block.ref_count) != bool(self._held[block.block_id]):
                raise IntegrityError(f"{block} is {'' if self._held[block.block_id] else 'not '}known as held")
            seen[_state_of(block)] += 1
            twin = block.next_twin
            if twin.prev_twin is not block or twin.key != block.key:
                raise IntegrityError(f"{block} and its twin {twin} disagree")
            if block.key is not None:
                indexed = self._index.get(block.key)
                if indexed is None or indexed.key != block.key:
                    raise IntegrityError(f"{block} has a key that the index lacks")
        states = ("empty", "cached", "referenced", "swapping")
        if any(seen[state] != getattr(counts, state) for state in states):
            raise IntegrityError(f"{counts} is counted, {dict(seen)} found")
        if any(block.key != key for key, block in self._index.items()):
            raise IntegrityError("the index names a block under a key that it does not have")
        null = self.blocks[0]
        if null.ref_count or null.key is not None:
            raise IntegrityError(f"the null {null} is in use")


def _state_of(block: Block) -> str:
    if block.ref_count:
        return "referenced"
    if block.is_copying:
        return "swapping"
    return "empty" if block.key is None else "cached"
