"""Which tokens a query still sees, and therefore how many blocks a request needs, however long it gets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Window:
    """Every query sees the `num_tokens` tokens up to itself, and the first `num_sinks` of the sequence.

    Keeping the first tokens keeps models stable that were trained without a window (attention sinks, Xiao et al.,
    Efficient Streaming Language Models, arXiv 2309.17453); positions stay those of the whole sequence.
    """

    num_tokens: int
    num_sinks: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_sinks < 0:
            raise ValueError(
                f"a window of {self.num_tokens} tokens and {self.num_sinks} sinks; at least 1 and 0 are needed"
            )

    @property
    def num_seen(self) -> int:
        """Tokens that a query sees at most."""
        return self.num_tokens + self.num_sinks

    def num_sink_blocks(self, block_size: int) -> int:
        """Leading blocks that are never given back."""
        return -(-self.num_sinks // block_size)

    def first_block(self, num_computed: int, block_size: int) -> int:
        """The first block behind the sinks that a token is still seen of, once so many tokens are computed."""
        oldest = max(0, num_computed - self.num_tokens + 1)
        return max(self.num_sink_blocks(block_size), oldest // block_size)

    def max_blocks(self, max_chunk_tokens: int, block_size: int) -> int:
        """Blocks that a request needs at most to compute so many tokens in one step, wherever a block begins."""
        span = self.num_tokens - 1 + max_chunk_tokens
        return self.num_sink_blocks(block_size) + (span - 2) // block_size + 2


Windows = tuple[Window | None, ...]
"""What the layers of each block table see; None: everything."""

DEFAULT_SINKS = 4

UNBOUNDED = 1 << 62
"""More tokens than anybody has."""


def narrow(own: Window | None, limit: Window | None) -> Window | None:
    """The narrower of the two; `limit` must be really narrower, for its sinks are for tokens that the model misses."""
    return limit if limit is not None and (own is None or limit.num_tokens < own.num_tokens) else own


def salt_of(salt: str, window: Window | None) -> str:
    """A prefix cache's salt for requests with such a window of their own: what later layers keep of a token depends on
    what earlier ones saw, so their blocks are not those of other requests."""
    return salt if window is None else f"{salt}\0window {window.num_tokens}+{window.num_sinks}"


def num_held_blocks(windows: Windows, num_tokens: int, max_chunk_tokens: int, block_size: int) -> int:
    """Blocks in all tables that a request of so many tokens holds at a time at most."""
    most = -(-num_tokens // block_size)
    return sum(
        most if window is None else min(most, window.max_blocks(max(1, max_chunk_tokens), block_size))
        for window in windows
    )


@lru_cache(maxsize=1024)  # asked for every request, and always of the same few models and windows
def max_tokens(windows: Windows, num_blocks: int, block_size: int) -> int:
    """Tokens of one request whose KV fits into so many blocks, one after the other where there is a window."""

    def needed(count: int) -> int:
        return num_held_blocks(windows, count * block_size, 1, block_size)

    if None not in windows and needed(UNBOUNDED) <= num_blocks:
        return UNBOUNDED
    return block_size * (bisect_right(range(1, num_blocks + 1), num_blocks, key=needed))


def widest(windows: Iterable[Window | None]) -> int | None:
    """Tokens that the widest of these windows holds; None if one has no end."""
    sizes = [None if window is None else window.num_tokens for window in windows]
    return None if None in sizes else max(size for size in sizes if size is not None)
