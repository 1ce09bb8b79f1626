"""Attention over the paged cache, read in place, for prefill chunks and decodes in one call.

A work item is a tile of query rows (tokens x the query heads of one KV head) over a range of key tiles of 128 tokens.
Within a key tile scores, weights and their product with the values are computed as register tiles; key tiles are merged
in order with the running maximum (online softmax, as in FlashAttention, arXiv 2205.14135). Key tiles start at multiples
of 128 positions and are merged in the same order whether one item or several compute them, so a row's result depends on
its sequence only. The last key tile of a prefill may hold more tokens than a row sees: their weights are exactly zero.
With a window, tiles that it hides are left out, but for those with sinks, and hidden blocks of the others are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from worker.kernels.cpu.compile import call_paged_tile, call_tile
from worker.kernels.cpu.layout import (
    HEAD_PARTIALS,
    HEAD_SCORE_TILE,
    HEAD_SCRATCH,
    HEAD_VALUE_TILE,
    SCRATCH_BYTES,
    field,
)
from worker.kernels.cpu.plan import (
    COUNT,
    FIRST_ROW,
    ITEM_FIELDS,
    KEY_TILE,
    KV_HEAD,
    PARTIAL,
    ROW,
    TILE_BEGIN,
    TILE_END,
    AttentionField,
    item_range,
    merge_range,
    place_of,
)
from worker.kernels.cpu.simd import (
    F32,
    LANES,
    float_of_bits,
    kernel,
    load_f32,
    load_i32,
    load_i64,
    per_word,
    prefetch,
    store_f32,
    store_i64,
    vadd,
    vexp2,
    vfma,
    vlargest,
    vlimit,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vstore_first,
    vsub,
    vsum,
)
from worker.kernels.cpu.tile import COLUMNS, MAX_ROWS

_WORD_BYTES = 4
_GROUP = 8  # tokens with one address in the table of key addresses
_LINE = 64
_FEW_ROWS = 6  # up to so many, memory is the bottleneck
_HIDDEN = -1e30  # a score that weighs nothing; finite, so that differences stay numbers
_MAX_HEAD_DIM = 256
_STATE_BYTES = 2 * LANES * 4 + MAX_ROWS * _MAX_HEAD_DIM * 4  # maxima, sums, weighted values

# Places in a thread's scratch memory, in bytes.
_QUERY = 0
_SCORES = _QUERY + MAX_ROWS * _MAX_HEAD_DIM * 4
_WEIGHTS = _SCORES + MAX_ROWS * KEY_TILE * 4
_KEY_TABLE = _WEIGHTS + MAX_ROWS * KEY_TILE * 4
_VALUE_TABLE = _KEY_TABLE + KEY_TILE // _GROUP * 8
_FACTORS = _VALUE_TABLE + KEY_TILE // _GROUP * 8
_RUNNING = _FACTORS + 2 * LANES * 4
_TILE = _RUNNING + _STATE_BYTES
assert _TILE + _STATE_BYTES <= SCRATCH_BYTES

(
    _Q, _OUT, _KEYS, _VALUES, _BLOCK_STRIDE, _HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _WINDOWS, _SCALE, _STARTS,
    _LENS, _TABLE_ROWS, _TABLES, _TABLE_STRIDE, _SINKS, _PLAN,
) = (int(f) for f in AttentionField)  # fmt: skip


def state_bytes() -> int:
    """Bytes of one partial result."""
    return _STATE_BYTES


@kernel
def _sinks(record: int, item: int) -> Any:
    """Sinks of the item's row."""
    return load_i32(field(record, _SINKS) + 4 * field(item, ROW))


@kernel
def _copy_query(tag: Any, record: int, item: int, start: int, query: int) -> Any:
    """Copies the item's query rows together."""
    heads, head_dim = field(record, _HEADS), field(record, _HEAD_DIM)
    group = heads // field(record, _KV_HEADS)
    first, head = field(item, FIRST_ROW), field(item, KV_HEAD) * group
    row_bytes = head_dim * _WORD_BYTES // per_word(tag)
    for r in range(field(item, COUNT)):
        token, member = (first + r) // group, (first + r) % group
        source = field(record, _Q) + ((start + token) * heads + head + member) * row_bytes
        for offset in range(0, row_bytes, 8):
            store_i64(load_i64(source + offset), query + r * row_bytes + offset)


@kernel
def _address_tables(
    tag: Any, record: int, kv_head: int, blocks: int, first: int, count: int, oldest: int, sinks: int, scratch: int
) -> Any:
    """Addresses of the keys and values of every 8 tokens from position `first` on.

    The key table is filled to its end with the last address, since scores are computed for whole register tiles. Tokens
    before `oldest` that are no sinks may have lost their block: others that have one stand in for them, as many as are
    read from one address.
    """
    head_dim, block_size = field(record, _HEAD_DIM), field(record, _BLOCK_SIZE)
    head_bytes = kv_head * head_dim * block_size * _WORD_BYTES // per_word(tag)
    groups = (count + _GROUP - 1) // _GROUP
    unit = LANES if block_size % LANES == 0 else _GROUP
    spare = first if first < sinks else first + (count - 1) // unit * unit
    key = 0
    for i in range(KEY_TILE // _GROUP):
        if i < groups:
            position = first + i * _GROUP
            within = position % unit
            if position - within + unit <= oldest and position - within >= sinks:
                position = spare + within
            offset = position % block_size
            block = load_i32(blocks + 4 * (position // block_size)) * field(record, _BLOCK_STRIDE) + head_bytes
            key = field(record, _KEYS) + block + offset * _WORD_BYTES
            value = field(record, _VALUES) + block + offset // per_word(tag) * head_dim * _WORD_BYTES
            store_i64(value, scratch + _VALUE_TABLE + 8 * i)
        store_i64(key, scratch + _KEY_TABLE + 8 * i)


@kernel
def _prefetch_piece(address: int, num_bytes: int) -> Any:
    for offset in range(0, num_bytes, _LINE):
        prefetch(address + offset)


@kernel
def _prefetch_tile(tag: Any, record: int, item: int, tile: int, part: int) -> Any:
    """Asks for one key tile's keys or values (`part`) ahead of use; a decode waits for memory more than it computes."""
    row, block_size = field(item, ROW), field(record, _BLOCK_SIZE)
    blocks = field(record, _TABLES) + load_i32(field(record, _TABLE_ROWS) + 4 * row) * field(record, _TABLE_STRIDE)
    first = place_of(item, tile, _sinks(record, item)) * KEY_TILE
    last = min(first + KEY_TILE, load_i32(field(record, _LENS) + 4 * row)) - 1
    piece = field(record, _HEAD_DIM) * block_size * _WORD_BYTES // per_word(tag)
    for i in range(first // block_size, last // block_size + 1):
        block = load_i32(blocks + 4 * i) * field(record, _BLOCK_STRIDE)
        _prefetch_piece(field(record, part) + block + field(item, KV_HEAD) * piece, piece)


@kernel
def _prefetch_next(tag: Any, record: int, item: int, tile: int, end: int) -> Any:
    """Asks for the keys of the tile that this thread computes after `tile` of `item`."""
    if tile + 1 == field(item, TILE_END):
        item += 8 * ITEM_FIELDS
        if item >= end:
            return
        tile = field(item, TILE_BEGIN) - 1
    _prefetch_tile(tag, record, item, tile + 1, _KEYS)


@kernel
def _score(tag: Any, record: int, tile: int, rows: int, count: int, scratch: int) -> Any:
    """Scores of the query rows against `count` keys, in register tiles of 32 keys."""
    block_size, head_dim = field(record, _BLOCK_SIZE), field(record, _HEAD_DIM)
    steps = head_dim // per_word(tag)
    stride, c_stride = block_size * _WORD_BYTES, KEY_TILE * 4
    for column in range(0, count, COLUMNS):
        starts = scratch + _KEY_TABLE + column // _GROUP * 8
        query, scores = scratch + _QUERY, scratch + _SCORES + column * 4
        call_tile(tag, tile, rows, query, steps * _WORD_BYTES, starts, stride, steps, scores, c_stride)


@kernel
def _limit(value: Any, low: int, high: int, sinks: int, other: Any) -> Any:
    """The lanes in [low, high) and those below `sinks`; `other`, the least of all values, in place of the rest."""
    limited = vlimit(value, low, high, other)
    return vmax(limited, vlimit(value, 0, sinks, other)) if sinks > 0 else limited


@kernel
def _weigh_row(tag: Any, scores: int, scale: Any, low: int, high: int, sinks: int, count: int, weights: int) -> Any:
    """Turns a row's scores into weights 2**(score - maximum), zero outside [low, high) and from `sinks` on; maximum and
    sum."""
    hidden = np.float32(_HIDDEN)
    largest = vsplat(hidden)
    for c in range(0, count, LANES):
        score = _limit(vmul(vload(F32, scores + 4 * c), scale), low - c, high - c, sinks - c, hidden)
        vstore(F32, score, scores + 4 * c)
        largest = vmax(largest, score)
    maximum = vlargest(largest)
    total = vsplat(np.float32(0.0))
    for c in range(0, count, LANES):
        weight = vexp2(vsub(vload(F32, scores + 4 * c), vsplat(maximum)))
        weight = _limit(weight, low - c, high - c, sinks - c, np.float32(0.0))
        total = vadd(total, weight)
        vstore(tag, weight, weights + c * (_WORD_BYTES // per_word(tag)))
    return maximum, vsum(total)


@kernel
def _key_tile(
    tag: Any, record: int, head: int, item: int, position: int, blocks: int, tile: int, scratch: int, state: int
) -> Any:
    """One key tile's maxima, sums and weighted values, into `state`; `tile` is its place in the sequence."""
    head_dim, sinks = field(record, _HEAD_DIM), _sinks(record, item)
    window = load_i32(field(record, _WINDOWS) + 4 * field(item, ROW))
    group = field(record, _HEADS) // field(record, _KV_HEADS)
    rows, first_row = field(item, COUNT), field(item, FIRST_ROW)
    first = tile * KEY_TILE
    count = min(KEY_TILE, position + (first_row + rows - 1) // group + 1 - first)
    oldest = position + first_row // group - window + 1 if window > 0 else 0
    _address_tables(tag, record, field(item, KV_HEAD), blocks, first, count, oldest, sinks, scratch)
    _score(tag, record, field(head, HEAD_SCORE_TILE), rows, count, scratch)
    scale = vsplat(float_of_bits(field(record, _SCALE)))
    weight_bytes = KEY_TILE * _WORD_BYTES // per_word(tag)
    for r in range(rows):
        here = position + (first_row + r) // group
        low = here - window + 1 - first if window > 0 else 0
        scores, weights = scratch + _SCORES + r * KEY_TILE * 4, scratch + _WEIGHTS + r * weight_bytes
        high = here + 1 - first
        maximum, total = _weigh_row(tag, scores, scale, low, high, min(sinks - first, high), count, weights)
        store_f32(maximum, state + 4 * r)
        store_f32(total, state + 4 * (LANES + r))
    pack = per_word(tag)
    steps = (count + pack - 1) // pack
    for column in range(0, head_dim, COLUMNS):
        values = state + 2 * LANES * 4 + column * 4
        call_paged_tile(
            tag, field(head, HEAD_VALUE_TILE), rows, scratch + _WEIGHTS, weight_bytes, scratch + _VALUE_TABLE,
            _GROUP // pack, column * _WORD_BYTES, head_dim * _WORD_BYTES, steps, values, _MAX_HEAD_DIM * 4,
        )  # fmt: skip


@kernel
def _absorb(running: int, state: int, rows: int, head_dim: int, factors: int) -> Any:
    """Merges the next key tile's state into the running one."""
    old, new = vload(F32, running), vload(F32, state)
    maximum = vmax(old, new)
    keep, take = vexp2(vsub(old, maximum)), vexp2(vsub(new, maximum))
    total = vfma(vload(F32, state + 4 * LANES), take, vmul(vload(F32, running + 4 * LANES), keep))
    vstore(F32, maximum, running)
    vstore(F32, total, running + 4 * LANES)
    vstore(F32, keep, factors)
    vstore(F32, take, factors + 4 * LANES)
    for r in range(rows):
        keep, take = vsplat(load_f32(factors + 4 * r)), vsplat(load_f32(factors + 4 * (LANES + r)))
        offset = 2 * LANES * 4 + r * _MAX_HEAD_DIM * 4
        for c in range(0, head_dim, LANES):
            value = vmul(vload(F32, running + offset + 4 * c), keep)
            vstore(F32, vfma(vload(F32, state + offset + 4 * c), take, value), running + offset + 4 * c)


@kernel
def _write_out(tag: Any, record: int, item: int, start: int, running: int) -> Any:
    """Divides by the sums and writes the item's rows of the output."""
    heads, head_dim = field(record, _HEADS), field(record, _HEAD_DIM)
    group = heads // field(record, _KV_HEADS)
    first, head = field(item, FIRST_ROW), field(item, KV_HEAD) * group
    size = _WORD_BYTES // per_word(tag)
    for r in range(field(item, COUNT)):
        token, member = (first + r) // group, (first + r) % group
        out = field(record, _OUT) + ((start + token) * heads + head + member) * head_dim * size
        inverse = vsplat(np.float32(1.0) / load_f32(running + 4 * (LANES + r)))
        values = running + 2 * LANES * 4 + r * _MAX_HEAD_DIM * 4
        for c in range(0, head_dim, LANES):
            value = vmul(vload(F32, values + 4 * c), inverse)
            if head_dim - c >= LANES:
                vstore(tag, value, out + c * size)
            else:
                vstore_first(tag, value, out + c * size, head_dim - c)


def attention(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """Computes this thread's items; split ones go to the partial results."""
    scratch = field(head, HEAD_SCRATCH) + thread * SCRATCH_BYTES
    item, end = item_range(field(record, _PLAN), thread)
    while item < end:
        row = field(item, ROW)
        start = load_i32(field(record, _STARTS) + 4 * row)
        new = load_i32(field(record, _STARTS) + 4 * row + 4) - start
        position = load_i32(field(record, _LENS) + 4 * row) - new
        table_row = load_i32(field(record, _TABLE_ROWS) + 4 * row)
        blocks = field(record, _TABLES) + table_row * field(record, _TABLE_STRIDE)
        _copy_query(tag, record, item, start, scratch + _QUERY)
        first, partial = field(item, TILE_BEGIN), field(item, PARTIAL)
        running = scratch + _RUNNING
        if partial >= 0:
            running = field(head, HEAD_PARTIALS) + partial * _STATE_BYTES
        for tile in range(first, field(item, TILE_END)):
            state = running if tile == first else scratch + _TILE
            if field(item, COUNT) <= _FEW_ROWS:
                _prefetch_tile(tag, record, item, tile, _VALUES)
                _prefetch_next(tag, record, item, tile, end)
            place = place_of(item, tile, _sinks(record, item))
            _key_tile(tag, record, head, item, position, blocks, place, scratch, state)
            if tile > first:
                _absorb(running, state, field(item, COUNT), field(record, _HEAD_DIM), scratch + _FACTORS)
        if partial < 0:
            _write_out(tag, record, item, start, running)
        item += 8 * ITEM_FIELDS


def merge_partials(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """Merges the partial results of split items in the order of their key tiles."""
    scratch = field(head, HEAD_SCRATCH) + thread * SCRATCH_BYTES
    item, end = merge_range(field(record, _PLAN), thread, threads)
    while item < end:
        start = load_i32(field(record, _STARTS) + 4 * field(item, ROW))
        running = field(head, HEAD_PARTIALS) + field(item, PARTIAL) * _STATE_BYTES
        for i in range(1, field(item, TILE_END) - field(item, TILE_BEGIN)):
            state = running + i * _STATE_BYTES
            _absorb(running, state, field(item, COUNT), field(record, _HEAD_DIM), scratch + _FACTORS)
        _write_out(tag, record, item, start, running)
        item += 8 * ITEM_FIELDS
