"""The decoder as a program of kernels, recorded once over buffers that last as long as the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker.cache.groups import LayerGroups
from worker.cache.storage import KVStorage
from worker.kernels import AttentionShape, Backend, Epilogue, Linear, Program, Rows, StepSizes, StepTables
from worker.model.config import Activation, ModelConfig
from worker.model.layers import rope_table

_GATES = {Activation.SILU: Epilogue.GATE, Activation.GELU_TANH: Epilogue.GELU_GATE}


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
        tables: Sequence[StepTables],
        groups: LayerGroups,
        num_threads: int,
    ) -> None:
        """`tables`: one for each of the `groups` of layers."""
        self._config = config
        self._tensors = tensors
        self._backend = backend
        self._dtype = dtype
        self._tables = tables
        self._groups = groups
        self._shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=storage.layout.block_size,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        )
        max_tokens, max_samples = len(tables[0].token_ids), len(tables[0].sample_tokens)
        max_positions = tables[0].block_tables.shape[1] * storage.layout.block_size
        self._rope = self._local_rope = rope_table(config, max_positions)
        if config.local_rope_theta is not None:
            local = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
            self._local_rope = rope_table(local, max_positions)
        self._residual = torch.zeros(max_tokens, config.hidden_size)
        self._normed = torch.zeros(max_tokens, config.hidden_size, dtype=dtype)
        self._qkv = torch.zeros(max_tokens, self._shape.qkv_width)
        self._query = torch.zeros(max_tokens, config.num_heads * config.head_dim, dtype=dtype)
        self._attended = torch.zeros_like(self._query)
        self._activated = torch.zeros(max_tokens, config.intermediate_size, dtype=dtype)
        self._branch = torch.zeros(max_tokens if config.post_norms else 0, config.hidden_size)
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
        config, tables = self._config, self._tables[0]
        program = self._backend.program(self._dtype, num_threads)
        embedding = self._pack("embed")
        head = embedding if config.tie_embeddings else self._pack("lm_head")
        scale = float(torch.tensor(config.embed_scale).to(self._dtype))  # as the models were trained with
        program.embed(tables.token_ids, embedding, self._residual, scale)
        for index in range(config.num_layers):
            self._record_attention(program, f"layers.{index}.", storage, index)
            self._record_mlp(program, f"layers.{index}.")
        norm = self._norm("norm")
        program.rms_norm_rows(self._residual, tables.sample_tokens, norm, config.rms_norm_eps, self._last)
        program.linear(self._last, head, self._logits, rows=Rows.SAMPLES)
        return program

    def _record_attention(self, program: Program, prefix: str, storage: KVStorage, index: int) -> None:
        config = self._config
        group, place = self._groups.places[index]
        tables, cache = self._tables[group], storage.layer(place)
        rope = self._rope if config.windows[index] is None else self._local_rope
        qkv = self._pack(*(prefix + name for name in "qkv"), bias=config.attention_bias)
        q_norm = self._norm(prefix + "q_norm") if config.qk_norm else None
        k_norm = self._norm(prefix + "k_norm") if config.qk_norm else None
        program.rms_norm(self._residual, self._norm(prefix + "attn_norm"), config.rms_norm_eps, self._normed)
        program.linear(self._normed, qkv, self._qkv)
        program.rope_store(
            self._qkv, rope, tables, self._shape, cache, self._query, q_norm, k_norm, config.rms_norm_eps
        )
        program.attention(self._query, tables, self._shape, cache, self._attended)
        output = self._pack(prefix + "o", bias=config.o_bias)
        self._record_sum(program, self._attended, output, prefix + "attn_post_norm")

    def _record_mlp(self, program: Program, prefix: str) -> None:
        program.rms_norm(self._residual, self._norm(prefix + "mlp_norm"), self._config.rms_norm_eps, self._normed)
        gated = self._backend.pack_gated(self._tensors[prefix + "gate"], self._tensors[prefix + "up"], self._dtype)
        program.linear(self._normed, gated, self._activated, epilogue=_GATES[self._config.activation])
        self._record_sum(program, self._activated, self._pack(prefix + "down"), prefix + "mlp_post_norm")

    def _record_sum(self, program: Program, x: Tensor, weight: Linear, norm: str) -> None:
        """Adds a product to the residual stream, normed before if the model does that."""
        if not self._config.post_norms:
            program.linear(x, weight, self._residual, epilogue=Epilogue.ADD)
            return
        program.linear(x, weight, self._branch)
        program.add_rms_norm(self._branch, self._norm(norm), self._config.rms_norm_eps, self._residual)

    def _pack(self, *names: str, bias: bool = False) -> Linear:
        biases = [self._tensors[name + "_bias"] if bias else None for name in names]
        return self._backend.pack([self._tensors[name] for name in names], biases, self._dtype)

    def _norm(self, name: str) -> Tensor:
        return (self._config.norm_offset + self._tensors[name].to(self._dtype).float()).contiguous()
