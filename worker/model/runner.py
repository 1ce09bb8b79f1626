"""The executor of the engine's batches: inputs, forward pass, sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.types import Band, SamplingParams
from common.window import Window, narrow
from worker.cache.groups import group_layers
from worker.cache.storage import KVLayout, KVStorage
from worker.engine.batch import Batch, BatchRow, SampledToken
from worker.engine.executor import SamplingError
from worker.engine.request import Request
from worker.kernels import Backend
from worker.model.config import ModelConfig
from worker.model.inputs import StepInputs
from worker.model.transformer import Transformer


class TokenSampler(Protocol):
    """Chooses one token for each request from its row of logits."""

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """One token for each row of logits, float32 [len(requests), vocab]; the rows are read, not kept.

        Raises SamplingError, by row of logits, where there is none.
        """
        ...


class ModelRunner:
    """An `Executor` over one model on this machine's CPUs.

    `window`, if any, limits what a token sees of its sequence where the model's own window is wider. Raises ValueError
    for a cache, model or limit that the kernels cannot serve.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        backend: Backend,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        sampler: TokenSampler,
        window: Window | None = None,
        num_threads: int | None = None,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError(
                f"max_num_seqs is {max_num_seqs}, max_num_batched_tokens is {max_num_batched_tokens}, at least 1 needed"
            )
        if config.num_heads % config.num_kv_heads:
            raise ValueError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly")
        self._sampler = sampler
        groups = group_layers(config.windows)
        owns = (None if own is None else Window(own) for own in groups.windows)
        self.windows = tuple(narrow(own, window) for own in owns)
        self.storage = KVStorage(KVLayout.of(config, block_size, dtype), num_blocks)
        max_blocks = -(-config.max_positions // block_size)
        self._inputs = StepInputs(max_num_seqs, max_num_batched_tokens, max_blocks, block_size, self.windows)
        self._transformer = Transformer(
            config,
            tensors,
            backend=backend,
            dtype=dtype,
            storage=self.storage,
            tables=self._inputs.tables,
            groups=groups,
            num_threads=num_threads if num_threads is not None else torch.get_num_threads(),
        )

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.storage.layout.block_size

    @property
    def num_blocks(self) -> int:
        """KV blocks, numbered from 0."""
        return self.storage.num_blocks

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """See `Executor.execute`."""
        logits = self.compute(batch)
        sampling = [index for index, row in enumerate(batch.rows) if row.samples]
        tokens: list[SampledToken | None] = [None] * len(batch.rows)
        if not sampling:
            return tokens
        try:
            sampled = self._sampler.sample(logits, [batch.rows[index].request for index in sampling])
        except SamplingError as error:  # it names rows of logits
            raise SamplingError({sampling[row]: message for row, message in error.messages.items()}) from error
        for index, token in zip(sampling, sampled, strict=True):
            tokens[index] = token
        return tokens

    def compute(self, batch: Batch) -> Tensor:
        """Writes the batch's KV; the logits of the rows that sample, in order, float32 [samples, vocab].

        The result is a view of a buffer that the next step overwrites.
        """
        return self._transformer.forward(self._inputs.prepare(batch))

    def close(self) -> None:
        """Ends the kernels' threads; call it when no step will follow."""
        self._transformer.close()

    def warm_up(self) -> None:
        """Runs a few tokens through block 0, so that no later step pays for compiling or first touches.

        Call it before block 0 holds anything.
        """
        sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        count = min(2, self.block_size)
        request = Request("", 0, 0, [0] * count, count, sampling, Band.LOW, "", 0, slot=0)
        request.block_ids = [0] * len(self.windows)
        for num_new in range(count, 0, -1):
            request.num_computed = count - num_new
            self.execute(Batch((BatchRow(request, num_new),)))
