"""The work list of attention: made once per step for the layers that share a table, split evenly by cost in advance."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from worker.kernels.cpu.layout import HEAD_ROWS, field
from worker.kernels.cpu.simd import kernel, load_i32, load_i64, store_i64
from worker.kernels.cpu.tile import MAX_ROWS

KEY_TILE = 128
"""Tokens whose scores are computed together; also the piece by which one long decode is split."""

MAX_PARTIALS = 256
MAX_THREADS = 128


class AttentionField(IntEnum):
    """Fields of an ATTENTION, PLAN or MERGE record."""

    Q = 1
    OUT = 2
    KEYS = 3
    VALUES = 4
    BLOCK_STRIDE = 5  # bytes
    HEADS = 6
    KV_HEADS = 7
    HEAD_DIM = 8
    BLOCK_SIZE = 9
    WINDOWS = 10  # int32, for each row; 0: none
    SCALE = 11  # bits of a float32; times log2(e)
    QUERY_STARTS = 12
    SEQ_LENS = 13
    TABLE_ROWS = 14
    BLOCK_TABLES = 15
    TABLE_STRIDE = 16  # bytes
    SINKS = 17  # int32, for each row: tokens that are seen besides the window; 0 without a window
    PLAN = 18


_HEADS, _KV_HEADS, _WINDOWS = int(AttentionField.HEADS), int(AttentionField.KV_HEADS), int(AttentionField.WINDOWS)
_STARTS, _LENS, _SINKS = int(AttentionField.QUERY_STARTS), int(AttentionField.SEQ_LENS), int(AttentionField.SINKS)
_PLAN = int(AttentionField.PLAN)

# The plan: counts, each thread's first item, items, merges. Ranges are half-open.
_NUM_ITEMS, _NUM_MERGES, _BOUNDS = 0, 1, 2
_ITEMS = _BOUNDS + MAX_THREADS + 1
ITEM_FIELDS = 9
ROW, KV_HEAD, FIRST_ROW, COUNT, TILE_BEGIN, TILE_END, PARTIAL, SKIPPED, _COST = range(ITEM_FIELDS)
# An item's tiles are counted without those that a window hides from all of its rows: tiles from the one with the last
# sink on lie SKIPPED tiles further on.


def plan_fields(max_tokens: int, max_rows: int, num_heads: int, num_kv_heads: int) -> int:
    """64-bit fields that the largest plan needs."""
    group = num_heads // num_kv_heads
    query_tiles = max_tokens * group // MAX_ROWS + max_rows
    return _ITEMS + ITEM_FIELDS * (num_kv_heads * query_tiles + 2 * MAX_PARTIALS)


@kernel
def _item(plan: int, index: int) -> Any:
    return plan + 8 * (_ITEMS + ITEM_FIELDS * (MAX_PARTIALS + index))


@kernel
def _merge(plan: int, index: int) -> Any:
    return plan + 8 * (_ITEMS + ITEM_FIELDS * index)


@kernel
def _write(
    item: int, row: int, kv_head: int, first: int, count: int, begin: int, end: int, partial: int, skipped: int
) -> Any:
    store_i64(row, item)
    store_i64(kv_head, item + 8 * KV_HEAD)
    store_i64(first, item + 8 * FIRST_ROW)
    store_i64(count, item + 8 * COUNT)
    store_i64(begin, item + 8 * TILE_BEGIN)
    store_i64(end, item + 8 * TILE_END)
    store_i64(partial, item + 8 * PARTIAL)
    store_i64(skipped, item + 8 * SKIPPED)
    cost = (end - begin) * (count + 4) + 1
    store_i64(cost, item + 8 * _COST)
    return cost


@kernel
def sink_tiles(sinks: int) -> Any:
    """Key tiles that hold sinks."""
    return (sinks + KEY_TILE - 1) // KEY_TILE


@kernel
def place_of(item: int, tile: int, sinks: int) -> Any:
    """Where the item's tile of this number lies in the sequence."""
    return tile + field(item, SKIPPED) if tile >= sink_tiles(sinks) else tile


@kernel
def _bound(plan: int, items: int, total: int, threads: int) -> Any:
    """Cuts the list into one piece for each thread, of nearly equal cost."""
    passed, thread = 0, 0
    for i in range(items):
        while thread < threads and passed * threads >= total * thread:
            store_i64(i, plan + 8 * (_BOUNDS + thread))
            thread += 1
        passed += load_i64(_item(plan, i) + 8 * _COST)
    while thread <= threads:
        store_i64(items, plan + 8 * (_BOUNDS + thread))
        thread += 1


def make_plan(tag: Any, record: int, head: int, thread: int, threads: int) -> None:
    """Lists the step's items. One query tile over many key tiles is split into them while few rows run.

    Splitting spreads the work over the threads; the result is the same either way.
    """
    if thread != 0:
        return
    plan, rows, kv_heads = field(record, _PLAN), field(head, HEAD_ROWS), field(record, _KV_HEADS)
    group = field(record, _HEADS) // kv_heads
    items, merges, partials, total = 0, 0, 0, 0
    for row in range(rows):
        window = load_i32(field(record, _WINDOWS) + 4 * row)
        sinks = sink_tiles(load_i32(field(record, _SINKS) + 4 * row))
        start = load_i32(field(record, _STARTS) + 4 * row)
        new = load_i32(field(record, _STARTS) + 4 * row + 4) - start
        position = load_i32(field(record, _LENS) + 4 * row) - new
        flat = new * group
        tiles = (flat + MAX_ROWS - 1) // MAX_ROWS
        for kv_head in range(kv_heads):
            for i in range(tiles):
                first, last = flat * i // tiles, flat * (i + 1) // tiles
                end = (position + (last - 1) // group) // KEY_TILE + 1
                seen = position + first // group - window + 1
                skipped = max(0, seen // KEY_TILE - sinks) if window > 0 and seen > 0 else 0
                pieces = end - skipped
                if tiles > 1 or pieces < 2 or rows * kv_heads >= 8 * threads or partials + pieces > MAX_PARTIALS:
                    total += _write(_item(plan, items), row, kv_head, first, last - first, 0, pieces, -1, skipped)
                    items += 1
                    continue
                _write(_merge(plan, merges), row, kv_head, first, last - first, 0, pieces, partials, skipped)
                merges += 1
                for piece in range(pieces):
                    total += _write(
                        _item(plan, items), row, kv_head, first, last - first, piece, piece + 1, partials, skipped
                    )  # fmt: skip
                    items += 1
                    partials += 1
    store_i64(items, plan)
    store_i64(merges, plan + 8 * _NUM_MERGES)
    _bound(plan, items, total, threads)


@kernel
def item_range(plan: int, thread: int) -> Any:
    """Addresses of the thread's first item and of the one behind its last."""
    first = load_i64(plan + 8 * (_BOUNDS + thread))
    last = load_i64(plan + 8 * (_BOUNDS + thread + 1))
    return _item(plan, first), _item(plan, last)


@kernel
def merge_range(plan: int, thread: int, threads: int) -> Any:
    """The same for merges."""
    count = load_i64(plan + 8 * _NUM_MERGES)
    return _merge(plan, count * thread // threads), _merge(plan, count * (thread + 1) // threads)
