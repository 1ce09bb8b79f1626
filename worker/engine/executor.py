"""The port between the engine, which decides, and the model, which computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.engine.batch import Batch, SampledToken


class SamplingError(Exception):
    """The model gave no usable distribution (NaN or infinite logits) for some rows.

    Nothing was sampled for any row and no request has changed: fail the named requests, and schedule the others again.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        super().__init__(f"logits are not finite for requests {', '.join(self.request_ids)}")


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
