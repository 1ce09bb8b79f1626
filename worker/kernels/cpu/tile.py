"""The one inner product everything is built from: a few rows times 32 columns, kept in registers over the whole sum.

C[r, 0:32] = sum over k of A[r, k] * B[k, 0:32], in float32, each element one chain of additions in the order of k. So a
row's result does not depend on how many rows share a tile. One step of k is 32 bits of A: a float32, or a pair of
bfloat16, and then B holds pairs too, and the machine's pairwise dot product is used where it exists.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from worker.kernels.cpu.simd import (
    I32,
    I64,
    INTS,
    LANES,
    VECTOR,
    VECTOR_BYTES,
    BFloat,
    bits,
    call,
    constant,
    cpu_has,
    instruction,
    is_pair,
    load,
    multiply_add,
    splat,
    store,
)

COLUMNS = 32
MAX_ROWS = 12 if cpu_has("avx512f") else 3
"""Rows that fit into the registers: 12 x 2 of 32 wide ones, or 3 x 2 of 16 narrower ones."""

_HALF = LANES // 2


def _pair_product(builder: ir.IRBuilder, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """acc + a.low * b.low + a.high * b.high for bfloat16 pairs in 32-bit lanes."""
    if cpu_has("avx512f", "avx512bf16"):
        pairs = ir.VectorType(BFloat(), 2 * LANES)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return call(builder, name, VECTOR, acc, bits(builder, a, pairs), bits(builder, b, pairs))
    shift, mask = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [-65536] * LANES)
    low = [bits(builder, builder.shl(x, shift), VECTOR) for x in (a, b)]
    high = [bits(builder, builder.and_(x, mask), VECTOR) for x in (a, b)]
    return multiply_add(builder, high[0], high[1], multiply_add(builder, low[0], low[1], acc))


def _step(builder: ir.IRBuilder, pair: bool, acc: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    if pair:
        return _pair_product(builder, acc, a, b)
    return multiply_add(builder, bits(builder, a, VECTOR), bits(builder, b, VECTOR), acc)


def _columns(builder: ir.IRBuilder, starts: list[ir.Value], offset: ir.Value) -> list[ir.Value]:
    """The two column vectors at `offset` behind their starts; four starts are those of half vectors."""
    addresses = [builder.add(start, offset) for start in starts]
    if len(addresses) == 2:
        return [load(builder, address, INTS, 4) for address in addresses]
    halves = [load(builder, address, ir.VectorType(I32, _HALF), 4) for address in addresses]
    both = ir.Constant(INTS, list(range(LANES)))
    return [builder.shuffle_vector(halves[i], halves[i + 1], both) for i in (0, 2)]


class _Loop:
    """A counted loop with the accumulators carried in registers."""

    def __init__(self, builder: ir.IRBuilder, count: ir.Value, carried: list[ir.Value]) -> None:
        self._builder, self._count = builder, count
        entry = builder.block
        self._body, self._end = builder.append_basic_block("body"), builder.append_basic_block("end")
        self._entry, self._initial = entry, carried
        builder.cbranch(builder.icmp_signed(">", count, I64(0)), self._body, self._end)
        builder.position_at_end(self._body)
        self.index = builder.phi(I64)
        self.index.add_incoming(I64(0), entry)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, entry)

    def close(self, carried: list[ir.Value]) -> list[ir.Value]:
        """Ends the body; the values behind the loop."""
        builder, last = self._builder, self._builder.block
        following = builder.add(self.index, I64(1))
        self.index.add_incoming(following, last)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, last)
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, self._end)
        builder.position_at_end(self._end)
        results = []
        for initial, value in zip(self._initial, carried, strict=True):
            phi = builder.phi(value.type)
            phi.add_incoming(initial, self._entry)
            phi.add_incoming(value, last)
            results.append(phi)
        return results


def _sum(
    builder: ir.IRBuilder, pair: bool, rows: list[ir.Value], starts: list[ir.Value], stride: ir.Value, steps: ir.Value,
    accs: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """Adds `steps` steps of k to the accumulators; A's rows advance by 4 bytes, B by `stride`."""
    loop = _Loop(builder, steps, accs)
    columns = _columns(builder, starts, builder.mul(loop.index, stride))
    a_offset = builder.mul(loop.index, I64(4))
    sums = list(loop.carried)
    for r, row in enumerate(rows):
        a = splat(builder, load(builder, builder.add(row, a_offset), I32, 4))
        for c, column in enumerate(columns):
            sums[2 * r + c] = _step(builder, pair, sums[2 * r + c], a, column)
    return loop.close(sums)


def _for_row_count(builder: ir.IRBuilder, count: ir.Value, emit: Any) -> None:
    """Emits one variant for each number of rows and a switch over them; anything else does nothing."""
    end = builder.append_basic_block("done")
    switch = builder.switch(count, end)
    for rows in range(1, MAX_ROWS + 1):
        block = builder.append_basic_block(f"rows{rows}")
        switch.add_case(I64(rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(end)


def _row_addresses(builder: ir.IRBuilder, a: ir.Value, stride: ir.Value, rows: int) -> list[ir.Value]:
    return [builder.add(a, builder.mul(stride, I64(r))) for r in range(rows)]


def _store_tile(builder: ir.IRBuilder, accs: list[ir.Value], c: ir.Value, stride: ir.Value) -> None:
    for i, acc in enumerate(accs):
        row = builder.add(c, builder.mul(stride, I64(i // 2)))
        store(builder, acc, builder.add(row, I64(VECTOR_BYTES * (i % 2))), 4)


def _zeros(rows: int) -> list[ir.Value]:
    return [constant(0.0)] * (2 * rows)


@instruction
def dot_tile(
    typingctx: Any, tag: Any, rows: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, steps: Any, c: Any, c_stride: Any
) -> Any:
    """B is contiguous over its 32 columns: b + k * b_stride. Strides in bytes, 1 <= rows <= MAX_ROWS."""
    pair = is_pair(tag)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows, a, a_stride, b, b_stride, steps, c, c_stride = args

        def emit(count: int) -> None:
            addresses = _row_addresses(builder, a, a_stride, count)
            starts = [b, builder.add(b, I64(VECTOR_BYTES))]
            _store_tile(builder, _sum(builder, pair, addresses, starts, b_stride, steps, _zeros(count)), c, c_stride)

        _for_row_count(builder, rows, emit)
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 8), codegen


def _dot_tile_from(name: str, offsets: tuple[int, ...]) -> Any:
    """A tile whose columns come in groups from anywhere: their addresses are in a table, at these byte offsets."""

    def typed(
        typingctx: Any,
        tag: Any,
        rows: Any,
        a: Any,
        a_stride: Any,
        starts: Any,
        b_stride: Any,
        steps: Any,
        c: Any,
        c_stride: Any,
    ) -> Any:
        pair = is_pair(tag)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, rows, a, a_stride, starts, b_stride, steps, c, c_stride = args
            groups = [load(builder, builder.add(starts, I64(offset)), I64, 8) for offset in offsets]

            def emit(count: int) -> None:
                addresses = _row_addresses(builder, a, a_stride, count)
                sums = _sum(builder, pair, addresses, groups, b_stride, steps, _zeros(count))
                _store_tile(builder, sums, c, c_stride)

            _for_row_count(builder, rows, emit)
            return context.get_dummy_value()

        return types.void(tag, *[types.int64] * 8), codegen

    typed.__name__ = name
    return instruction(typed)


dot_tile_eights = _dot_tile_from("dot_tile_eights", (0, 8, 16, 24))
dot_tile_sixteens = _dot_tile_from("dot_tile_sixteens", (0, 16))


@instruction
def dot_tile_paged(
    typingctx: Any,
    tag: Any,
    rows: Any,
    a: Any,
    a_stride: Any,
    pages: Any,
    page_steps: Any,
    offset: Any,
    b_stride: Any,
    steps: Any,
    c: Any,
    c_stride: Any,
) -> Any:
    """B comes in pages of `page_steps` rows: row k at pages[k // page_steps] + offset + k % page_steps * b_stride."""
    pair = is_pair(tag)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, rows, a, a_stride, pages, page_steps, offset, b_stride, steps, c, c_stride = args
        count_pages = builder.sdiv(builder.add(steps, builder.sub(page_steps, I64(1))), page_steps)

        def emit(count: int) -> None:
            loop = _Loop(builder, count_pages, _zeros(count))
            first = builder.mul(loop.index, page_steps)
            left = builder.sub(steps, first)
            here = builder.select(builder.icmp_signed("<", left, page_steps), left, page_steps)
            base = builder.add(a, builder.mul(first, I64(4)))
            page = load(builder, builder.add(pages, builder.mul(loop.index, I64(8))), I64, 8)
            start = builder.add(page, offset)
            starts = [start, builder.add(start, I64(VECTOR_BYTES))]
            addresses = _row_addresses(builder, base, a_stride, count)
            sums = _sum(builder, pair, addresses, starts, b_stride, here, list(loop.carried))
            _store_tile(builder, loop.close(sums), c, c_stride)

        _for_row_count(builder, rows, emit)
        return context.get_dummy_value()

    return types.void(tag, *[types.int64] * 10), codegen


# The tiles as functions to be compiled on their own.


def tile(tag: Any, rows: int, a: int, a_stride: int, b: int, b_stride: int, steps: int, c: int, c_stride: int) -> None:
    """See `dot_tile`."""
    dot_tile(tag, rows, a, a_stride, b, b_stride, steps, c, c_stride)


def tile_eights(
    tag: Any, rows: int, a: int, a_stride: int, starts: int, b_stride: int, steps: int, c: int, c_stride: int
) -> None:
    """`starts` is a table with the address of every 8 columns."""
    dot_tile_eights(tag, rows, a, a_stride, starts, b_stride, steps, c, c_stride)


def tile_sixteens(
    tag: Any, rows: int, a: int, a_stride: int, starts: int, b_stride: int, steps: int, c: int, c_stride: int
) -> None:
    """The same table, where 16 columns are always contiguous."""
    dot_tile_sixteens(tag, rows, a, a_stride, starts, b_stride, steps, c, c_stride)


def tile_paged(
    tag: Any,
    rows: int,
    a: int,
    a_stride: int,
    pages: int,
    page_steps: int,
    offset: int,
    b_stride: int,
    steps: int,
    c: int,
    c_stride: int,
) -> None:
    """See `dot_tile_paged`."""
    dot_tile_paged(tag, rows, a, a_stride, pages, page_steps, offset, b_stride, steps, c, c_stride)
