"""The port between the engine, which decides, and the model, which computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from worker.engine.batch import Batch, SampledToken


class ExecutionError(Exception):
    """A step could not be computed; the KV of earlier steps is intact. The batch's requests end with an error."""


class SamplingError(ExecutionError):
    """Some rows have no valid next token, for instance because their logits are NaN.

    Only these requests end with an error; the other rows are computed again by a later step.
    """

    def __init__(self, messages: Mapping[int, str]) -> None:
        """`messages` by index of the row in the batch; raises ValueError without any, as nothing would change."""
        if not messages:
            raise ValueError("a SamplingError without a row")
        super().__init__("; ".join(f"row {row}: {message}" for row, message in messages.items()))
        self.messages = dict(messages)


class Executor(Protocol):
    """Computes batches over a paged KV cache of `num_blocks` blocks of `block_size` tokens."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks, numbered from 0. The pool may reserve some (null block)."""
        ...

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """Writes the KV of every row's new tokens and samples where a row asks for it.

        For a row at position i the input tokens are `request.token_ids[num_computed : num_computed + num_new]`, their
        KV goes to the blocks that `request.block_ids` names for these positions. Returns one entry per row, None where
        `row.samples` is false. Reads requests, never writes them. Blocking; called from one thread only.

        Raises:
            SamplingError: no token can be sampled for some rows; the step has no result.
        """
        ...
