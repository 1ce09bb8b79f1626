"""What one engine step computes: rows of (request, number of new tokens)."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import PositionLogprobs
from worker.engine.request import Request


@dataclass(frozen=True, slots=True)
class BatchRow:
    """`num_new` tokens of a request, starting at its `num_computed`; its block table covers them already."""

    request: Request
    num_new: int

    @property
    def samples(self) -> bool:
        """Whether a token is sampled: only where the chunk reaches the last known token."""
        return self.request.num_computed + self.num_new == self.request.num_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work; rows are in scheduling order, each request at most once."""

    rows: tuple[BatchRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_new for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token sampled for one row, with log probabilities if the request asked for them."""

    token_id: int
    logprobs: PositionLogprobs | None = None
