"""Which tokens a query still sees, and therefore how many blocks a request needs, however long it gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def narrow(own: Window | None, limit: Window | None) -> Window | None:
    """The narrower of the two; `limit` must be really narrower, for its sinks are for tokens that the model misses."""
    return limit if limit is not None and (own is None or limit.num_tokens < own.num_tokens) else own


def widest(windows: Iterable[Window | None]) -> int | None:
    """Tokens that the widest of these windows holds; None if one has no end."""
    sizes = [None if window is None else window.num_tokens for window in windows]
    return None if None in sizes else max(size for size in sizes if size is not None)
