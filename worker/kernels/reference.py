"""The specification of every kernel in plain torch: simple, float32 inside, free to gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.kernels.program import AttentionShape, Epilogue, LayerCache, Linear, Rows, StepSizes, StepTables


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """A plain matrix [out, in]; values are those of the model dtype, held in float32."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        """Columns of an input row."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Columns of an output row before the epilogue."""
        return self.weight.shape[0]


def _plain(linear: Linear) -> ReferenceLinear:
    if not isinstance(linear, ReferenceLinear):
        raise TypeError(f"the reference backend takes what it packed itself, got {type(linear).__name__}")
    return linear


class ReferenceProgram:
    """A list of closures, run one after another."""

    def __init__(self) -> None:
        self._kernels: list[Callable[[StepSizes], None]] = []

    def run(self, sizes: StepSizes) -> None:
        """Runs the recorded kernels in order."""
        for kernel in self._kernels:
            kernel(sizes)

    def close(self) -> None:
        """Nothing to end."""

    def embed(self, token_ids: Tensor, table: Linear, out: Tensor, scale: float = 1.0) -> None:
        """See `Program.embed`."""
        weight = _plain(table).weight

        def kernel(sizes: StepSizes) -> None:
            out[: sizes.num_tokens] = weight[token_ids[: sizes.num_tokens].long()] * scale

        self._kernels.append(kernel)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Program.rms_norm`."""

        def kernel(sizes: StepSizes) -> None:
            out[: sizes.num_tokens] = _rms_norm(x[: sizes.num_tokens], weight, eps).to(out.dtype)

        self._kernels.append(kernel)

    def add_rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Program.add_rms_norm`."""

        def kernel(sizes: StepSizes) -> None:
            out[: sizes.num_tokens] += _rms_norm(x[: sizes.num_tokens], weight, eps)

        self._kernels.append(kernel)

    def rms_norm_rows(self, x: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Program.rms_norm_rows`."""

        def kernel(sizes: StepSizes) -> None:
            rows = x[index[: sizes.num_samples].long()]
            out[: sizes.num_samples] = _rms_norm(rows, weight, eps).to(out.dtype)

        self._kernels.append(kernel)

    def linear(
        self, x: Tensor, weight: Linear, out: Tensor, rows: Rows = Rows.TOKENS, epilogue: Epilogue = Epilogue.STORE
    ) -> None:
        """See `Program.linear`."""
        plain = _plain(weight)

        def kernel(sizes: StepSizes) -> None:
            n = sizes.num_tokens if rows is Rows.TOKENS else sizes.num_samples
            y = functional.linear(x[:n].float(), plain.weight, plain.bias)
            if epilogue is Epilogue.ADD:
                out[:n] += y
            elif epilogue.is_gated:
                gate, up = y.chunk(2, dim=1)
                gelu = epilogue is Epilogue.GELU_GATE
                gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
                out[:n] = (gate * up).to(out.dtype)
            else:
                out[:n] = y.to(out.dtype)

        self._kernels.append(kernel)

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
        """See `Program.rope_store`."""

        def kernel(sizes: StepSizes) -> None:
            n = sizes.num_tokens
            heads = qkv[:n].view(n, -1, shape.head_dim)
            q, k, v = heads.tensor_split((shape.num_heads, shape.num_heads + shape.num_kv_heads), dim=1)
            if q_norm is not None:
                q = _rms_norm(q, q_norm, eps)
            if k_norm is not None:
                k = _rms_norm(k, k_norm, eps)
            cos_sin = rope[tables.positions[:n].long()]
            q_out[:n] = _rotate(q, cos_sin).reshape(n, -1).to(q_out.dtype)
            slots = tables.slots[:n].long()
            block, offset, pack = slots // shape.block_size, slots % shape.block_size, cache.keys.shape[-1]
            packed_k = _rotate(k, cos_sin).view(n, shape.num_kv_heads, -1, pack).to(cache.keys.dtype)
            cache.keys[block, :, :, offset] = packed_k
            cache.values[block, :, offset // pack, :, offset % pack] = v.to(cache.values.dtype)

        self._kernels.append(kernel)

    def attention(self, q: Tensor, tables: StepTables, shape: AttentionShape, cache: LayerCache, out: Tensor) -> None:
        """See `Program.attention`."""

        def kernel(sizes: StepSizes) -> None:
            for row in range(sizes.num_rows):
                first, last = tables.query_starts[row : row + 2].tolist()
                length = int(tables.seq_lens[row])
                window, sinks = int(tables.windows[row]), int(tables.sinks[row])
                indices = _seen_blocks(length - (last - first), length, shape.block_size, window, sinks)
                blocks = tables.block_tables[tables.table_rows[row], indices].long()
                keys, values = _gather(cache, blocks, shape)
                positions = (indices[:, None] * shape.block_size + torch.arange(shape.block_size)).flatten()
                query = q[first:last].view(last - first, shape.num_heads, shape.head_dim).float()
                attended = _attend(query, keys, values, positions, length, shape.scale, window, sinks)
                out[first:last] = attended.reshape(last - first, -1).to(out.dtype)

        self._kernels.append(kernel)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotates [tokens, heads, head_dim] by [tokens, 2, head_dim / 2]."""
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _seen_blocks(start: int, length: int, block_size: int, window: int, sinks: int) -> Tensor:
    """Places in the block table that the positions from `start` up to `length` see, int64 [n]."""
    indices = torch.arange(-(-length // block_size))
    if not window:
        return indices
    oldest = max(0, start - window + 1)
    return indices[(indices >= oldest // block_size) | (indices * block_size < sinks)]


def _gather(cache: LayerCache, blocks: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Keys and values [kv_heads, blocks * block_size, head_dim], in float32."""
    keys = cache.keys[blocks].permute(1, 0, 3, 2, 4)  # kv_heads, blocks, block_size, head_dim / p, p
    values = cache.values[blocks].permute(1, 0, 2, 4, 3)  # kv_heads, blocks, block_size / p, p, head_dim
    flat = (shape.num_kv_heads, -1, shape.head_dim)
    return keys.reshape(flat).float(), values.reshape(flat).float()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, length: int, scale: float, window: int, sinks: int
) -> Tensor:
    """The last `len(query)` of `length` positions attend to the keys at `positions` [n], causally and within the
    window; values of keys behind `length` are anything."""
    num_new = query.shape[0]
    keys, values = keys[:, positions < length], values[:, positions < length]
    positions = positions[positions < length]
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = torch.einsum("qhd,hkd->hqk", query, keys) * scale
    distance = torch.arange(length - num_new, length)[:, None] - positions[None, :]
    hidden = distance < 0
    if window:
        hidden |= (distance >= window) & (positions >= sinks)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,hkd->qhd", weights, values)


class ReferenceBackend:
    """Plain torch; defines what the other backends must compute."""

    name = "reference"

    def pack(self, matrices: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> ReferenceLinear:
        """See `Backend.pack`."""
        bias = None
        if any(b is not None for b in biases):
            parts = [torch.zeros(m.shape[0]) if b is None else b.float() for m, b in zip(matrices, biases, strict=True)]
            bias = torch.cat(parts)
        return ReferenceLinear(torch.cat([m.to(dtype).float() for m in matrices]), bias)

    def pack_gated(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> ReferenceLinear:
        """See `Backend.pack_gated`; gate first, then up."""
        return self.pack([gate, up], [None, None], dtype)

    def program(self, dtype: torch.dtype, num_threads: int) -> ReferenceProgram:
        """See `Backend.program`; torch's own threads are used."""
        return ReferenceProgram()
