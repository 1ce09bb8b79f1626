"""The llama-family decoder as a program of kernels, recorded once over buffers that last as long as the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from worker.cache.storage import KVStorage
from worker.cache.window import Window
from worker.kernels import AttentionShape, Backend, Epilogue, Linear, Program, Rows, StepSizes, StepTables
from worker.model.config import ModelConfig
from worker.model.layers import rope_table


class Transformer:
    """Packs the weights, owns the activations, and computes logits.

    The residual stream is float32; what enters a matrix product has the model dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        backend: Backend,
        dtype: torch.dtype,
        storage: KVStorage,
        tables: StepTables,
        window: Window | None,
        num_threads: int,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._backend = backend
        self._dtype = dtype
        self._tables = tables
        self._shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=storage.layout.block_size,
            scale=config.head_dim**-0.5,
            window=None if window is None else window.num_tokens,
            sinks=0 if window is None else window.num_sinks,
        )
        max_tokens, max_samples = len(tables.token_ids), len(tables.sample_tokens)
        max_positions = tables.block_tables.shape[1] * storage.layout.block_size
        self._rope = rope_table(config, max_positions)
        self._residual = torch.zeros(max_tokens, config.hidden_size)
        self._normed = torch.zeros(max_tokens, config.hidden_size, dtype=dtype)
        self._qkv = torch.zeros(max_tokens, self._shape.qkv_width)
        self._query = torch.zeros(max_tokens, config.num_heads * config.head_dim, dtype=dtype)
        self._attended = torch.zeros_like(self._query)
        self._activated = torch.zeros(max_tokens, config.intermediate_size, dtype=dtype)
        self._last = torch.zeros(max_samples, config.hidden_size, dtype=dtype)
        self._logits = torch.zeros(max_samples, config.vocab_size)
        self._program = self._record(storage, num_threads)
        self._tensors = {}  # packed by now: lets go of the originals

    def forward(self, sizes: StepSizes) -> Tensor:
        """Logits of the step's samples, float32 [num_samples, vocab]; a view that the next step overwrites."""
        self._program.run(sizes)
        return self._logits[: sizes.num_samples]

    def close(self) -> None:
        """Ends the program's threads."""
        self._program.close()

    def _record(self, storage: KVStorage, num_threads: int) -> Program:
        config, tables = self._config, self._tables
        program = self._backend.program(self._dtype, num_threads)
        embedding = self._pack("embed")
        head = embedding if config.tie_embeddings else self._pack("lm_head")
        program.embed(tables.token_ids, embedding, self._residual)
        for index in range(config.num_layers):
            self._record_attention(program, f"layers.{index}.", storage, index)
            self._record_mlp(program, f"layers.{index}.")
        norm = self._vector("norm")
        program.rms_norm_rows(self._residual, tables.sample_tokens, norm, config.rms_norm_eps, self._last)
        program.linear(self._last, head, self._logits, rows=Rows.SAMPLES)
        return program

    def _record_attention(self, program: Program, prefix: str, storage: KVStorage, index: int) -> None:
        config, cache = self._config, storage.layer(index)
        qkv = self._pack(*(prefix + name for name in "qkv"), bias=config.attention_bias)
        q_norm = self._vector(prefix + "q_norm") if config.qk_norm else None
        k_norm = self._vector(prefix + "k_norm") if config.qk_norm else None
        program.rms_norm(self._residual, self._vector(prefix + "attn_norm"), config.rms_norm_eps, self._normed)
        program.linear(self._normed, qkv, self._qkv)
        program.rope_store(
            self._qkv, self._rope, self._tables, self._shape, cache, self._query, q_norm, k_norm, config.rms_norm_eps
        )
        program.attention(self._query, self._tables, self._shape, cache, self._attended)
        output = self._pack(prefix + "o", bias=config.o_bias)
        program.linear(self._attended, output, self._residual, epilogue=Epilogue.ADD)

    def _record_mlp(self, program: Program, prefix: str) -> None:
        program.rms_norm(self._residual, self._vector(prefix + "mlp_norm"), self._config.rms_norm_eps, self._normed)
        gated = self._backend.pack_gated(self._tensors[prefix + "gate"], self._tensors[prefix + "up"], self._dtype)
        program.linear(self._normed, gated, self._activated, epilogue=Epilogue.GATE)
        program.linear(self._activated, self._pack(prefix + "down"), self._residual, epilogue=Epilogue.ADD)

    def _pack(self, *names: str, bias: bool = False) -> Linear:
        biases = [self._tensors[name + "_bias"] if bias else None for name in names]
        return self._backend.pack([self._tensors[name] for name in names], biases, self._dtype)

    def _vector(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtype).float().contiguous()
