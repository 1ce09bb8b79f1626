"""A KV block, the key that names what it holds, and the list of blocks that are free to take."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

DIGEST_BYTES = 16


class BlockKey(NamedTuple):
    """What a full block holds: its own tokens after a certain prefix, under a certain salt.

    Equality compares the digest, the salt and the tokens themselves, so a dictionary keyed by it verifies every hit.
    """

    digest: bytes  # of the whole prefix up to and including this block
    salt: str
    tokens: bytes  # the block's own token ids, packed
    table: int = 0  # whose layers' keys and values it holds


DigestFunction = Callable[[bytes, bytes], bytes]
"""(digest of the parent block, bytes of this block) -> digest."""


def keyed_digest(secret: bytes) -> DigestFunction:
    """A digest that nobody without `secret` (0 to 64 bytes) can predict, so nobody can craft a prompt that collides."""

    def digest(parent: bytes, content: bytes) -> bytes:
        return hashlib.blake2b(parent + content, digest_size=DIGEST_BYTES, key=secret, person=b"block").digest()

    return digest


def first_parent(salt: str) -> bytes:
    """The digest in front of a request's first block; as long as every digest, and never equal to a block's."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"salt").digest()


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids (0 .. 2**32 - 1) as bytes."""
    return array("I", token_ids).tobytes()


class Block:
    """One block of the pool; only the pool writes to it.

    With references it is held by requests. Without, it lies in the free list: cached if it has a key, else empty; and
    swapping, either way, while it is copied.
    """

    __slots__ = ("block_id", "is_copying", "key", "next_free", "next_twin", "prev_free", "prev_twin", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.is_copying = False  # to the host, beside the steps
        self.prev_free: Block | None = None
        self.next_free: Block | None = None
        # The ring of blocks with an equal key; alone, a block is its own neighbour.
        self.prev_twin: Block = self
        self.next_twin: Block = self

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, {'keyed' if self.key else 'no key'})"


class FreeList:
    """Blocks without references, first to take at the front; every operation is O(1), also taking from the middle."""

    def __init__(self) -> None:
        self._end = Block(-1)  # sentinel: next is the front, prev the back
        self._end.next_free = self._end.prev_free = self._end
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """From front to back; linear, for audits only."""
        block = self._end.next_free
        while block is not None and block is not self._end:
            yield block
            block = block.next_free

    @property
    def front(self) -> Block:
        """The first block to take. Raises IndexError if there is none."""
        block = self._end.next_free
        if block is None or block is self._end:
            raise IndexError("no free block")
        return block

    def append(self, block: Block) -> None:
        """Puts a block at the back: last to be taken."""
        self._insert(block, self._end.prev_free, self._end)

    def append_front(self, block: Block) -> None:
        """Puts a block at the front: first to be taken."""
        self._insert(block, self._end, self._end.next_free)

    def remove(self, block: Block) -> None:
        """Takes a block from wherever it lies. Raises ValueError if it is not in the list."""
        if block.prev_free is None or block.next_free is None:
            raise ValueError(f"{block} is not in the free list")
        block.prev_free.next_free = block.next_free
        block.next_free.prev_free = block.prev_free
        block.prev_free = block.next_free = None
        self._num_blocks -= 1

    def _insert(self, block: Block, prev: Block | None, after: Block | None) -> None:
        if block.prev_free is not None or prev is None or after is None:
            raise ValueError(f"{block} is in the free list already")
        block.prev_free, block.next_free = prev, after
        prev.next_free = after.prev_free = block
        self._num_blocks += 1
