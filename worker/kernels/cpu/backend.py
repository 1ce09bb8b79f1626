"""Lays out weights and records programs for the compiled CPU kernels."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.kernels.cpu import layout
from worker.kernels.cpu.attention import attention, merge_partials, state_bytes
from worker.kernels.cpu.compile import compiled
from worker.kernels.cpu.interpreter import enter
from worker.kernels.cpu.layout import FIELDS, HEAD_FIELDS, KERNEL, SCRATCH_BYTES
from worker.kernels.cpu.linear import ADD, GATE, GELU_GATE, STORE, EmbedField, LinearField, embed, linear
from worker.kernels.cpu.memory import aligned_zeros
from worker.kernels.cpu.plan import MAX_PARTIALS, MAX_THREADS, AttentionField, make_plan, plan_fields
from worker.kernels.cpu.rowwise import NormField, RopeField, rms_norm, rope_store
from worker.kernels.cpu.simd import LANES
from worker.kernels.cpu.team import Team
from worker.kernels.cpu.tile import COLUMNS, tile, tile_eights, tile_paged, tile_sixteens
from worker.kernels.program import AttentionShape, Epilogue, LayerCache, Linear, Rows, StepSizes, StepTables

_EPILOGUES = {Epilogue.STORE: STORE, Epilogue.ADD: ADD, Epilogue.GATE: GATE, Epilogue.GELU_GATE: GELU_GATE}
_SIZES = {Rows.TOKENS: layout.HEAD_TOKENS, Rows.SAMPLES: layout.HEAD_SAMPLES}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A matrix in panels of 32 rows, [panels, in / p, 32, p] with p elements in 32 bits; padded with zero rows."""

    panels: Tensor
    bias: Tensor | None  # float32 [panels * 32]
    in_features: int
    out_features: int


def _enter_with(dtype: torch.dtype) -> Callable[[int, int], None]:
    """The compiled interpreter as a call that lets other Python threads run; its tag argument holds nothing."""
    tag: Any = {torch.float32: ctypes.c_float, torch.bfloat16: ctypes.c_uint16}[dtype]
    function = ctypes.CFUNCTYPE(None, tag, ctypes.c_int64, ctypes.c_int64)(compiled(enter, dtype, 2))
    return functools.partial(function, 0)


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _stride(tensor: Tensor) -> int:
    """Bytes from one row to the next; raises ValueError unless the rest is contiguous."""
    if tensor.stride(-1) != 1 or (tensor.dim() > 2 and not tensor[0].is_contiguous()):
        raise ValueError(
            f"a buffer of shape {tuple(tensor.shape)} has strides {tensor.stride()}, rows must be contiguous"
        )
    return tensor.stride(0) * tensor.itemsize


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


class CpuProgram:
    """Records of 64-bit fields, walked by one compiled call; keeps every buffer it names alive."""

    def __init__(self, dtype: torch.dtype, num_threads: int) -> None:
        _check(1 <= num_threads <= MAX_THREADS, f"num_threads is {num_threads}, allowed: 1..{MAX_THREADS}")
        self._dtype = dtype
        self._num_threads = num_threads
        self._records: list[list[int]] = []
        self._buffers: list[object] = []
        self._scratch = aligned_zeros(num_threads * SCRATCH_BYTES)
        self._head = np.zeros(HEAD_FIELDS, np.int64)
        self._plans: dict[int, int] = {}  # addresses: of the work list by that of its block tables
        self._team: Team | None = None

    def __repr__(self) -> str:
        return f"CpuProgram({self._dtype}, kernels={len(self._records)}, num_threads={self._num_threads})"

    def run(self, sizes: StepSizes) -> None:
        """See `Program.run`."""
        if self._team is None:
            self._team = self._assemble()
        head = self._head
        head[layout.HEAD_TOKENS] = sizes.num_tokens
        head[layout.HEAD_ROWS] = sizes.num_rows
        head[layout.HEAD_SAMPLES] = sizes.num_samples
        self._team.run()

    def close(self) -> None:
        """See `Program.close`."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def embed(self, token_ids: Tensor, table: Linear, out: Tensor, scale: float = 1.0) -> None:
        """See `Program.embed`."""
        packed = self._packed(table)
        self._record(
            embed,
            {
                EmbedField.TOKENS: self._address(token_ids),
                EmbedField.TABLE: self._address(packed.panels),
                EmbedField.STEPS: packed.panels.shape[1],
                EmbedField.OUT: self._address(out),
                EmbedField.OUT_STRIDE: _stride(out),
                EmbedField.SCALE: _float_bits(scale),
            },
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Program.rms_norm`."""
        self._record_norm(x, weight, eps, out, 0, layout.HEAD_TOKENS)

    def add_rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Program.add_rms_norm`."""
        self._record_norm(x, weight, eps, out, 0, layout.HEAD_TOKENS, adds=True)

    def rms_norm_rows(self, x: Tensor, index: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `Program.rms_norm_rows`."""
        self._record_norm(x, weight, eps, out, self._address(index), layout.HEAD_SAMPLES)

    def linear(
        self, x: Tensor, weight: Linear, out: Tensor, rows: Rows = Rows.TOKENS, epilogue: Epilogue = Epilogue.STORE
    ) -> None:
        """See `Program.linear`."""
        packed = self._packed(weight)
        width = packed.out_features // 2 if epilogue.is_gated else packed.out_features
        _check(x.dtype is self._dtype, f"x is {x.dtype}, the program's dtype is {self._dtype}")
        _check(x.shape[1] == packed.in_features, f"x has {x.shape[1]} columns, the weight takes {packed.in_features}")
        _check(out.shape[1] == width, f"out has {out.shape[1]} columns, the product has {width}")
        _check(epilogue is not Epilogue.ADD or out.dtype is torch.float32, f"sums must be float32, got {out.dtype}")
        _check(not epilogue.is_gated or out.dtype is self._dtype, f"out must be {self._dtype}, got {out.dtype}")
        self._record(
            linear,
            {
                LinearField.X: self._address(x),
                LinearField.X_STRIDE: _stride(x),
                LinearField.WEIGHT: self._address(packed.panels),
                LinearField.STEPS: packed.panels.shape[1],
                LinearField.PANELS: packed.panels.shape[0],
                LinearField.OUT: self._address(out),
                LinearField.OUT_STRIDE: _stride(out),
                LinearField.WIDTH: width,
                LinearField.BIAS: 0 if packed.bias is None else self._address(packed.bias),
                LinearField.EPILOGUE: _EPILOGUES[epilogue],
                LinearField.OUT_IS_F32: int(out.dtype is torch.float32),
                LinearField.SIZE: _SIZES[rows],
            },
        )

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
        self._check_cache(shape, cache)
        _check(qkv.dtype is torch.float32 and rope.dtype is torch.float32, "qkv and rope must be float32")
        self._record(
            rope_store,
            {
                RopeField.QKV: self._address(qkv),
                RopeField.ROPE: self._address(rope),
                RopeField.Q_OUT: self._address(q_out),
                RopeField.KEYS: self._address(cache.keys),
                RopeField.VALUES: self._address(cache.values),
                RopeField.BLOCK_STRIDE: _stride(cache.keys),
                RopeField.HEADS: shape.num_heads,
                RopeField.KV_HEADS: shape.num_kv_heads,
                RopeField.HEAD_DIM: shape.head_dim,
                RopeField.BLOCK_SIZE: shape.block_size,
                RopeField.Q_NORM: 0 if q_norm is None else self._address(q_norm),
                RopeField.K_NORM: 0 if k_norm is None else self._address(k_norm),
                RopeField.EPS: _float_bits(eps),
                RopeField.POSITIONS: self._address(tables.positions),
                RopeField.SLOTS: self._address(tables.slots),
            },
        )

    def attention(self, q: Tensor, tables: StepTables, shape: AttentionShape, cache: LayerCache, out: Tensor) -> None:
        """See `Program.attention`; all layers of a program share one shape."""
        self._check_cache(shape, cache)
        fields = {
            AttentionField.Q: self._address(q),
            AttentionField.OUT: self._address(out),
            AttentionField.KEYS: self._address(cache.keys),
            AttentionField.VALUES: self._address(cache.values),
            AttentionField.BLOCK_STRIDE: _stride(cache.keys),
            AttentionField.HEADS: shape.num_heads,
            AttentionField.KV_HEADS: shape.num_kv_heads,
            AttentionField.HEAD_DIM: shape.head_dim,
            AttentionField.BLOCK_SIZE: shape.block_size,
            AttentionField.WINDOWS: self._address(tables.windows),
            AttentionField.SINKS: self._address(tables.sinks),
            AttentionField.SCALE: _float_bits(shape.scale * math.log2(math.e)),
            AttentionField.QUERY_STARTS: self._address(tables.query_starts),
            AttentionField.SEQ_LENS: self._address(tables.seq_lens),
            AttentionField.TABLE_ROWS: self._address(tables.table_rows),
            AttentionField.BLOCK_TABLES: self._address(tables.block_tables),
            AttentionField.TABLE_STRIDE: _stride(tables.block_tables),
        }
        if not self._plans:
            self._head[layout.HEAD_PARTIALS] = self._address(aligned_zeros(MAX_PARTIALS * state_bytes()))
            score = tile_eights if shape.block_size % LANES else tile_sixteens
            self._head[layout.HEAD_SCORE_TILE] = compiled(score, self._dtype, 8)
            self._head[layout.HEAD_VALUE_TILE] = compiled(tile_paged, self._dtype, 10)
        is_planned = tables.block_tables.data_ptr() in self._plans
        if not is_planned:
            size = plan_fields(len(tables.token_ids), len(tables.seq_lens), shape.num_heads, shape.num_kv_heads)
            self._plans[tables.block_tables.data_ptr()] = self._address(aligned_zeros(8 * size))
        fields[AttentionField.PLAN] = self._plans[tables.block_tables.data_ptr()]
        if not is_planned:
            self._record(make_plan, fields)
        self._record(attention, fields)
        self._record(merge_partials, fields)

    def _record_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, index: int, size: int, adds: bool = False
    ) -> None:
        _check(x.dtype is torch.float32 and weight.dtype is torch.float32, "x and weight must be float32")
        wanted = torch.float32 if adds else self._dtype
        _check(out.dtype is wanted, f"out must be {wanted}, got {out.dtype}")
        self._record(
            rms_norm,
            {
                NormField.X: self._address(x),
                NormField.X_STRIDE: _stride(x),
                NormField.WEIGHT: self._address(weight),
                NormField.WIDTH: x.shape[1],
                NormField.EPS: _float_bits(eps),
                NormField.OUT: self._address(out),
                NormField.OUT_STRIDE: _stride(out),
                NormField.INDEX: index,
                NormField.SIZE: size,
                NormField.ADDS: int(adds),
            },
        )

    def _record(self, kernel: Callable[..., None], fields: Mapping[Any, int]) -> None:
        record = [0] * FIELDS
        record[KERNEL] = compiled(kernel, self._dtype)
        for index, value in fields.items():
            record[index] = value
        self._records.append(record)
        self.close()

    def _assemble(self) -> Team:
        """Puts the records where the compiled code reads them, and starts the threads."""
        head, self._table = self._head, np.array(self._records, np.int64)
        head[layout.HEAD_RECORDS] = self._table.ctypes.data
        head[layout.HEAD_NUM_RECORDS] = len(self._records)
        head[layout.HEAD_SCRATCH] = self._scratch.data_ptr()
        head[layout.HEAD_TILE] = compiled(tile, self._dtype, 8)
        return Team(_enter_with(self._dtype), head.ctypes.data, self._num_threads)

    def _address(self, tensor: Tensor) -> int:
        """The tensor's address; the program keeps the tensor."""
        self._buffers.append(tensor)
        return tensor.data_ptr()

    def _packed(self, matrix: Linear) -> PackedLinear:
        if not isinstance(matrix, PackedLinear):
            raise TypeError(f"the cpu backend takes what it packed itself, got {type(matrix).__name__}")
        _check(matrix.panels.dtype is self._dtype, f"weights are {matrix.panels.dtype}, the program {self._dtype}")
        return matrix

    def _check_cache(self, shape: AttentionShape, cache: LayerCache) -> None:
        pack = 4 // self._dtype.itemsize
        keys = (shape.num_kv_heads, shape.head_dim // pack, shape.block_size, pack)
        values = (shape.num_kv_heads, shape.block_size // pack, shape.head_dim, pack)
        _check(cache.keys.dtype is self._dtype, f"the cache is {cache.keys.dtype}, the program {self._dtype}")
        _check(tuple(cache.keys.shape[1:]) == keys, f"key blocks are {tuple(cache.keys.shape[1:])}, not {keys}")
        _check(
            tuple(cache.values.shape[1:]) == values, f"value blocks are {tuple(cache.values.shape[1:])}, not {values}"
        )
        _check(_stride(cache.keys) == _stride(cache.values), "keys and values must have the same block stride")


class CpuBackend:
    """Kernels compiled for this machine's CPU."""

    name = "cpu"

    def pack(self, matrices: list[Tensor], biases: list[Tensor | None], dtype: torch.dtype) -> PackedLinear:
        """See `Backend.pack`."""
        out_features, in_features = sum(m.shape[0] for m in matrices), matrices[0].shape[1]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.zeros(-(-out_features // COLUMNS) * COLUMNS)
            row = 0
            for matrix, part in zip(matrices, biases, strict=True):
                if part is not None:
                    bias[row : row + matrix.shape[0]] = part
                row += matrix.shape[0]
        return PackedLinear(_panels(torch.cat([m.to(dtype) for m in matrices])), bias, in_features, out_features)

    def pack_gated(self, gate: Tensor, up: Tensor, dtype: torch.dtype) -> PackedLinear:
        """See `Backend.pack_gated`; a panel holds 16 rows of gate and the same 16 of up."""
        groups = -(-gate.shape[0] // LANES)
        both = torch.zeros(groups, 2, LANES, gate.shape[1], dtype=dtype)
        for which, matrix in enumerate((gate, up)):
            whole = torch.zeros(groups * LANES, matrix.shape[1], dtype=dtype)
            whole[: matrix.shape[0]] = matrix
            both[:, which] = whole.view(groups, LANES, -1)
        return PackedLinear(_panels(both.view(-1, gate.shape[1])), None, gate.shape[1], 2 * gate.shape[0])

    def program(self, dtype: torch.dtype, num_threads: int) -> CpuProgram:
        """See `Backend.program`."""
        # The kernels have threads of their own; torch's would wait between two of its operations by spinning, on the
        # cores that these need.
        torch.set_num_threads(1)
        return CpuProgram(dtype, num_threads)


def _panels(matrix: Tensor) -> Tensor:
    """A matrix [out, in] as panels; raises ValueError if `in` does not fill whole 32-bit words."""
    pack = 4 // matrix.itemsize
    rows, columns = matrix.shape
    _check(columns % pack == 0, f"a {matrix.dtype} matrix has {columns} input columns, a multiple of {pack} is needed")
    count = -(-rows // COLUMNS)
    size = count * COLUMNS * columns * matrix.itemsize
    panels = aligned_zeros(size).view(matrix.dtype).view(count, columns // pack, COLUMNS, pack)
    whole = rows // COLUMNS
    source = matrix[: whole * COLUMNS].view(whole, COLUMNS, columns // pack, pack)
    panels[:whole] = source.transpose(1, 2)
    if whole < count:
        rest = matrix[whole * COLUMNS :]
        panels[whole, :, : len(rest)] = rest.view(len(rest), columns // pack, pack).transpose(0, 1)
    return panels
