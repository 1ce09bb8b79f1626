"""Kernels that treat each token alone: RMS norm, rotary positions, and the write into the paged cache."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from worker.kernels.cpu.layout import HEAD_SCRATCH, HEAD_TOKENS, SCRATCH_BYTES, field, share
from worker.kernels.cpu.simd import (
    F32,
    LANES,
    float_of_bits,
    kernel,
    load_i16,
    load_i32,
    per_word,
    store_i16,
    store_i32,
    vadd,
    vfma,
    vload_first,
    vmul,
    vsplat,
    vstore_first,
    vsub,
    vsum,
)

_WORD_BYTES = 4


class NormField(IntEnum):
    """Fields of an RMS_NORM record."""

    X = 1
    X_STRIDE = 2  # bytes
    WEIGHT = 3  # float32
    WIDTH = 4
    EPS = 5  # bits of a float32
    OUT = 6
    OUT_STRIDE = 7
    INDEX = 8  # int32, which rows of x to take; or 0
    SIZE = 9
    ADDS = 10  # whether the result is added to out, which is float32 then


_X, _X_STRIDE, _WEIGHT, _WIDTH, _EPS, _OUT, _OUT_STRIDE, _INDEX, _SIZE, _ADDS = (int(f) for f in NormField)


class RopeField(IntEnum):
    """Fields of a ROPE_STORE record."""

    QKV = 1
    ROPE = 2
    Q_OUT = 3
    KEYS = 4
    VALUES = 5
    BLOCK_STRIDE = 6  # bytes
    HEADS = 7
    KV_HEADS = 8
    HEAD_DIM = 9
    BLOCK_SIZE = 10
    Q_NORM = 11
    K_NORM = 12
    EPS = 13
    POSITIONS = 14
    SLOTS = 15


(
    _QKV, _ROPE, _Q_OUT, _KEYS, _VALUES, _BLOCK_STRIDE, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _Q_NORM, _K_NORM,
    _R_EPS, _POSITIONS, _SLOTS,
) = (int(f) for f in RopeField)  # fmt: skip


@kernel
def _norm_row(tag: Any, x: int, weight: int, width: int, eps: Any, out: int, adds: int) -> Any:
    squares = vsplat(np.float32(0.0))
    for c in range(0, width, LANES):
        part = vload_first(F32, x + 4 * c, width - c)
        squares = vfma(part, part, squares)
    mean = vsum(squares) / np.float32(width)
    scale = vsplat(np.float32(1.0) / np.sqrt(mean + eps))
    for c in range(0, width, LANES):
        normed = vmul(vload_first(F32, x + 4 * c, width - c), scale)
        value = vmul(normed, vload_first(F32, weight + 4 * c, width - c))
        if adds != 0:
            vstore_first(F32, vadd(vload_first(F32, out + 4 * c, width - c), value), out + 4 * c, width - c)
            continue
        vstore_first(tag, value, out + c * (_WORD_BYTES // per_word(tag)), width - c)


def rms_norm(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """Root-mean-square norm of this thread's rows."""
    first, last = share(field(head, field(record, _SIZE)), thread, threads)
    index, eps = field(record, _INDEX), float_of_bits(field(record, _EPS))
    for row in range(first, last):
        source = load_i32(index + 4 * row) if index != 0 else row
        _norm_row(
            tag, field(record, _X) + source * field(record, _X_STRIDE), field(record, _WEIGHT), field(record, _WIDTH),
            eps, field(record, _OUT) + row * field(record, _OUT_STRIDE), field(record, _ADDS),
        )  # fmt: skip


@kernel
def _rotate(tag: Any, x: int, rope: int, half: int, out: int) -> Any:
    """Rotates one head: x float32 [2 * half], rope the position's cosines then sines."""
    size = _WORD_BYTES // per_word(tag)
    for c in range(0, half, LANES):
        left = half - c
        low, high = vload_first(F32, x + 4 * c, left), vload_first(F32, x + 4 * (half + c), left)
        cos, sin = vload_first(F32, rope + 4 * c, left), vload_first(F32, rope + 4 * (half + c), left)
        vstore_first(tag, vsub(vmul(low, cos), vmul(high, sin)), out + c * size, left)
        vstore_first(tag, vadd(vmul(high, cos), vmul(low, sin)), out + (half + c) * size, left)


@kernel
def _store_value(tag: Any, record: int, x: int, target: int, offset: int, alone: int, scratch: int) -> Any:
    """Writes one head's value at `offset` of a block; of a pair whose other half is not written yet, zeroes that.

    The product reads whole pairs with a weight of zero for the half that is no token yet, and 0 * NaN is NaN.
    """
    head_dim = field(record, _HEAD_DIM)
    pack = per_word(tag)
    size = _WORD_BYTES // pack
    for c in range(0, head_dim, LANES):
        vstore_first(tag, vload_first(F32, x + 4 * c, head_dim - c), scratch + c * size, head_dim - c)
    row = target + (offset // pack) * head_dim * _WORD_BYTES
    for d in range(head_dim):
        if pack == 1:
            store_i32(load_i32(scratch + 4 * d), row + 4 * d)
        elif alone:
            store_i32(load_i16(scratch + 2 * d) & 0xFFFF, row + 4 * d)
        else:
            store_i16(load_i16(scratch + 2 * d), row + 4 * d + 2 * (offset % 2))


def rope_store(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """Rotates q into its buffer, k into the cache, and copies v into the cache, for this thread's tokens."""
    tokens = field(head, HEAD_TOKENS)
    first, last = share(tokens, thread, threads)
    heads, kv_heads, head_dim = field(record, _HEADS), field(record, _KV_HEADS), field(record, _HEAD_DIM)
    block_size, slots = field(record, _BLOCK_SIZE), field(record, _SLOTS)
    size = _WORD_BYTES // per_word(tag)
    scratch = field(head, HEAD_SCRATCH) + thread * SCRATCH_BYTES
    rotated = scratch + 4 * head_dim
    for t in range(first, last):
        x = field(record, _QKV) + t * (heads + 2 * kv_heads) * head_dim * 4
        rope = field(record, _ROPE) + load_i32(field(record, _POSITIONS) + 4 * t) * head_dim * 4
        q_out = field(record, _Q_OUT) + t * heads * head_dim * size
        slot = load_i32(slots + 4 * t)
        offset = slot % block_size
        followed = t + 1 < tokens and load_i32(slots + 4 * (t + 1)) == slot + 1
        alone = offset % 2 == 0 and not followed
        block = (slot // block_size) * field(record, _BLOCK_STRIDE)
        for h in range(heads + kv_heads):
            source = x + h * head_dim * 4
            norm = field(record, _Q_NORM) if h < heads else field(record, _K_NORM)
            if norm != 0:
                _norm_row(F32, source, norm, head_dim, float_of_bits(field(record, _R_EPS)), scratch, 0)
                source = scratch
            _rotate(tag, source, rope, head_dim // 2, q_out + h * head_dim * size if h < heads else rotated)
            if h >= heads:
                target = field(record, _KEYS) + block + (h - heads) * head_dim * block_size * size
                for word in range(head_dim * size // _WORD_BYTES):
                    value = load_i32(rotated + 4 * word)
                    store_i32(value, target + (word * block_size + offset) * _WORD_BYTES)
        for h in range(kv_heads):
            source = x + (heads + kv_heads + h) * head_dim * 4
            target = field(record, _VALUES) + block + h * head_dim * block_size * size
            _store_value(tag, record, source, target, offset, alone, rotated)
