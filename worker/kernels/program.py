"""The contract of every kernel backend: a program over fixed buffers, recorded once, run once per step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class Rows(Enum):
    """Which of a step's sizes tells how many leading rows of its buffers a kernel works on."""

    TOKENS = "tokens"
    SAMPLES = "samples"


class Epilogue(Enum):
    """What a matrix product does with its result y."""

    STORE = "store"  # out = y
    ADD = "add"  # out += y; out is float32
    GATE = "gate"  # out = silu(gate) * up, where y holds both (see `pack_gated`)
    GELU_GATE = "gelu_gate"  # the same with the tanh form of gelu

    @property
    def is_gated(self) -> bool:
        """Whether the weight comes from `pack_gated`."""
        return self in (Epilogue.GATE, Epilogue.GELU_GATE)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """How much of the fixed buffers one step uses."""

    num_tokens: int  # tokens computed
    num_rows: int  # requests they belong to
    num_samples: int  # rows whose last token is sampled


@dataclass(frozen=True, slots=True)
class StepTables:
    """One step's inputs, in buffers that keep their address; all int32 and contiguous.

    Row r's tokens are `query_starts[r] : query_starts[r + 1]` and end at sequence position `seq_lens[r] - 1`. Its
    blocks are `block_tables[table_rows[r]]`. Token t is at `positions[t]`, and its KV goes to the cache slot `slots[t]`
    (block * block_size + offset). Sample s takes the hidden state of token `sample_tokens[s]`. A query of row r sees
    `windows[r]` tokens, itself included, and the first `sinks[r]` of the sequence; 0 and 0 stand for all tokens.
    """

    token_ids: Tensor  # [max_tokens]
    positions: Tensor  # [max_tokens]
    slots: Tensor  # [max_tokens]
    query_starts: Tensor  # [max_rows + 1]
    seq_lens: Tensor  # [max_rows]
    table_rows: Tensor  # [max_rows]
    block_tables: Tensor  # [table rows, max_blocks]
    sample_tokens: Tensor  # [max_rows]
    windows: Tensor  # [max_rows]
    sinks: Tensor  # [max_rows]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float

    @property
    def qkv_width(self) -> int:
        """Columns of the fused q, k, v product."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the paged KV cache, read and written in place.

    With p = 4 // itemsize (elements in 32 bits), keys are [num_blocks, kv_heads, head_dim / p, block_size, p] and
    values [num_blocks, kv_heads, block_size / p, head_dim, p]: the order in which the products read them. Only the
    first dimension may be strided. 128 bytes behind the last block must be readable.
    """

    keys: Tensor
    values: Tensor


class Linear(Protocol):
    """A weight matrix in its backend's own layout, with its bias."""

    @property
    def in_features(self) -> int:
        """Columns of an input row."""
        ...

    @property
    def out_features(self) -> int:
        """Columns of an output row before the epilogue."""
        ...


class Program(Protocol):
    """Kernels in the order of recording. Every method but `run` records; buffers keep their address for its lifetime.

    Buffers are contiguous in their last dimension and hold the maximal number of rows. "model dtype" is float32 or
    bfloat16, the same for weights, cache and activations; sums are always float32. A row's result depends on that row
    alone, never on its neighbours or on how a sequence is cut into chunks.
    """

    def embed(self, token_ids: Tensor, table: Linear, out: Tensor, scale: float = 1.0) -> None:
        """out[t] = row `token_ids[t]` of the table, times `scale`; out float32 [max_tokens, hidden]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out[t] = x[t] / rms(x[t]) * weight; x float32, weight float32 [hidden], out model dtype."""
        ...

    def add_rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out[t] += x[t] / rms(x[t]) * weight; x, weight and out float32."""
        ...

    def rms_norm_rows(self, x: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """`rms_norm` of the rows that `index` names: out[s] from x[index[s]], for the step's samples."""
        ...

    def linear(
        self, x: Tensor, weight: Linear, out: Tensor, rows: Rows = Rows.TOKENS, epilogue: Epilogue = Epilogue.STORE
    ) -> None:
        """y = x @ weight^T + bias, then the epilogue; x model dtype [*, in], out float32 or model dtype [*, out]."""
        ...

    def rope_store(
        self,
        qkv: Tensor,
        rope: Tensor,
        tables: StepTables,
        shape: AttentionShape,
        cache: LayerCache,
        q_out: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        """Norms (if given) and rotates q and k; writes q to q_out [max_tokens, heads * head_dim], k and v to the cache.

        qkv is float32 [max_tokens, qkv_width]; rope float32 [positions, 2, head_dim / 2], cosines then sines, the two
        rotary halves of a head apart; norms float32 [head_dim].
        """
        ...

    def attention(self, q: Tensor, tables: StepTables, shape: AttentionShape, cache: LayerCache, out: Tensor) -> None:
        """Causal attention of every token over its sequence's cached keys and values.

        With a window, blocks of which no token is seen are not read: their entries in the block table may say anything.
        q and out are [max_tokens, heads * head_dim], model dtype.
        """
        ...

    def run(self, sizes: StepSizes) -> None:
        """Runs the kernels on the leading rows that `sizes` names; blocking."""
        ...

    def close(self) -> None:
        """Ends the threads that `run` may have started; a later `run` starts them again."""
        ...


class Backend(Protocol):
    """A family of kernels for one kind of device."""

    @property
    def name(self) -> str:
        """Name for `load_backend`."""
        ...

    def pack(self, matrices: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> Linear:
        """Lays matrices [out_i, in] out as one, of sum(out_i) rows; a missing bias is zero."""
        ...

    def pack_gated(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> Linear:
        """Lays out the two matrices [out, in] of a gated product, for the gated epilogues."""
        ...

    def program(self, dtype: torch.dtype, num_threads: int) -> Program:
        """An empty program."""
        ...
