"""The matrix product with packed weights, and the embedding that reads the same packing.

A packed matrix is a sequence of panels of 32 output columns, [panels, in / p, 32, p] with p elements in 32 bits: the
order in which `dot_tile` reads it. Threads share the panels; rows of x stay in the second-level cache.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from worker.kernels.cpu.compile import call_tile
from worker.kernels.cpu.layout import HEAD_SCRATCH, HEAD_TILE, HEAD_TOKENS, SCRATCH_BYTES, field, share
from worker.kernels.cpu.simd import (
    F32,
    LANES,
    float_of_bits,
    kernel,
    load_i32,
    per_word,
    store_i32,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vload,
    vload_first,
    vmin,
    vmul,
    vsplat,
    vstore,
    vstore_first,
)
from worker.kernels.cpu.tile import COLUMNS, MAX_ROWS

_X_CACHE_BYTES = 384 * 1024
_MINUS_LOG2_E, _LARGEST_POWER, _ONE = np.float32(-1.4426950408889634), np.float32(126.0), np.float32(1.0)
_GELU_CUBE, _GELU_POWER = np.float32(0.044715), np.float32(-2.302208198)  # the power: -2 sqrt(2 / pi) log2(e)
_WORD_BYTES = 4
_PANEL_ROW_BYTES = COLUMNS * _WORD_BYTES


class LinearField(IntEnum):
    """Fields of a LINEAR record; addresses unless said otherwise."""

    X = 1
    X_STRIDE = 2  # bytes
    WEIGHT = 3
    STEPS = 4  # in / p
    PANELS = 5
    OUT = 6
    OUT_STRIDE = 7  # bytes
    WIDTH = 8  # columns of out
    BIAS = 9  # float32 [panels * 32], or 0
    EPILOGUE = 10  # STORE, ADD, GATE or GELU_GATE
    OUT_IS_F32 = 11
    SIZE = 12  # the head's field with the number of rows


STORE, ADD, GATE, GELU_GATE = range(4)

_X, _X_STRIDE, _WEIGHT, _STEPS, _PANELS, _OUT, _OUT_STRIDE, _WIDTH, _BIAS, _EPILOGUE, _OUT_IS_F32, _SIZE = (
    int(f) for f in LinearField
)


class EmbedField(IntEnum):
    """Fields of an EMBED record; the table is packed like a weight."""

    TOKENS = 1
    TABLE = 2
    STEPS = 3
    OUT = 4
    OUT_STRIDE = 5
    SCALE = 6  # bits of a float32


_E_TOKENS, _E_TABLE, _E_STEPS, _E_OUT, _E_OUT_STRIDE, _E_SCALE = (int(f) for f in EmbedField)


@kernel
def _put(tag: Any, value: Any, address: int, count: int) -> Any:
    if count >= LANES:
        vstore(tag, value, address)
    elif count > 0:
        vstore_first(tag, value, address, count)


@kernel
def _add(value: Any, address: int, count: int) -> Any:
    if count >= LANES:
        vstore(F32, vadd(vload(F32, address), value), address)
    elif count > 0:
        vstore_first(F32, vadd(vload_first(F32, address, count), value), address, count)


@kernel
def _silu(x: Any) -> Any:
    power = vmin(vmul(x, vsplat(_MINUS_LOG2_E)), vsplat(_LARGEST_POWER))
    return vdiv(x, vadd(vexp2(power), vsplat(_ONE)))


@kernel
def _gelu(x: Any) -> Any:
    """The tanh form: x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cube = vmul(vmul(x, x), x)
    inner = vfma(cube, vsplat(_GELU_CUBE), x)
    power = vmin(vmul(inner, vsplat(_GELU_POWER)), vsplat(_LARGEST_POWER))
    return vdiv(x, vadd(vexp2(power), vsplat(_ONE)))


@kernel
def _finish_row(tag: Any, record: int, tile: int, out: int, panel: int) -> Any:
    """The epilogue for 32 columns of one row: `tile` holds the sums, `out` is the row."""
    low, high = vload(F32, tile), vload(F32, tile + 64)
    bias = field(record, _BIAS)
    if bias != 0:
        low = vadd(low, vload(F32, bias + panel * _PANEL_ROW_BYTES))
        high = vadd(high, vload(F32, bias + panel * _PANEL_ROW_BYTES + 64))
    epilogue, width = field(record, _EPILOGUE), field(record, _WIDTH)
    if epilogue >= GATE:
        column = panel * LANES
        gate = _silu(low) if epilogue == GATE else _gelu(low)
        _put(tag, vmul(gate, high), out + column * (_WORD_BYTES // per_word(tag)), width - column)
        return
    column = panel * COLUMNS
    if epilogue == ADD:
        _add(low, out + column * 4, width - column)
        _add(high, out + column * 4 + 64, width - column - LANES)
    elif field(record, _OUT_IS_F32) != 0:
        _put(F32, low, out + column * 4, width - column)
        _put(F32, high, out + column * 4 + 64, width - column - LANES)
    else:
        size = _WORD_BYTES // per_word(tag)
        _put(tag, low, out + column * size, width - column)
        _put(tag, high, out + (column + LANES) * size, width - column - LANES)


def linear(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """One matrix product with its epilogue, this thread's panels."""
    rows = field(head, field(record, _SIZE))
    x, x_stride, steps = field(record, _X), field(record, _X_STRIDE), field(record, _STEPS)
    out, out_stride, weight = field(record, _OUT), field(record, _OUT_STRIDE), field(record, _WEIGHT)
    sums, tile = field(head, HEAD_SCRATCH) + thread * SCRATCH_BYTES, field(head, HEAD_TILE)
    first, last = share(field(record, _PANELS), thread, threads)
    chunk = max(1, _X_CACHE_BYTES // (x_stride * MAX_ROWS)) * MAX_ROWS
    for begin in range(0, rows, chunk):
        count = min(chunk, rows - begin)
        tiles = (count + MAX_ROWS - 1) // MAX_ROWS
        for panel in range(first, last):
            panel_weight = weight + panel * steps * _PANEL_ROW_BYTES
            for i in range(tiles):
                r0, r1 = begin + count * i // tiles, begin + count * (i + 1) // tiles
                call_tile(
                    tag, tile, r1 - r0, x + r0 * x_stride, x_stride, panel_weight, _PANEL_ROW_BYTES, steps, sums,
                    _PANEL_ROW_BYTES,
                )  # fmt: skip
                for r in range(r0, r1):
                    _finish_row(tag, record, sums + (r - r0) * _PANEL_ROW_BYTES, out + r * out_stride, panel)


def embed(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """Copies the tokens' rows out of the packed table, widened to float32 and scaled."""
    ids, table, steps = field(record, _E_TOKENS), field(record, _E_TABLE), field(record, _E_STEPS)
    first, last = share(field(head, HEAD_TOKENS), thread, threads)
    scale, width = vsplat(float_of_bits(field(record, _E_SCALE))), steps * per_word(tag)
    for t in range(first, last):
        row = load_i32(ids + 4 * t)
        source = table + (row // COLUMNS) * steps * _PANEL_ROW_BYTES + (row % COLUMNS) * _WORD_BYTES
        out = field(record, _E_OUT) + t * field(record, _E_OUT_STRIDE)
        for k in range(steps):
            word = load_i32(source + k * _PANEL_ROW_BYTES)
            if per_word(tag) == 2:
                store_i32(word << 16, out + 8 * k)
                store_i32(word & 0xFFFF0000, out + 8 * k + 4)
            else:
                store_i32(word, out + 4 * k)
        for c in range(0, width, LANES):
            vstore_first(F32, vmul(vload_first(F32, out + 4 * c, width - c), scale), out + 4 * c, width - c)
