"""Where the compiled kernels find their operands: records of 64-bit fields, written by Python, read by number."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from worker.kernels.cpu.simd import I64, instruction, kernel, load

FIELDS = 24
"""Fields of one recorded kernel."""

RECORD_BYTES = 8 * FIELDS
SCRATCH_BYTES = 64 * 1024
"""Working memory of one thread."""

# The head of a program.
(
    HEAD_RECORDS,
    HEAD_NUM_RECORDS,
    HEAD_TOKENS,
    HEAD_ROWS,
    HEAD_SAMPLES,
    HEAD_SCRATCH,
    HEAD_PARTIALS,
    HEAD_TILE,  # addresses of compiled tiles
    HEAD_SCORE_TILE,
    HEAD_VALUE_TILE,
) = range(10)
HEAD_FIELDS = 16

KERNEL = 0
"""The field of a record with the address of its compiled function."""


@instruction
def field(typingctx: Any, record: Any, index: Any) -> Any:
    """A field of the record at this address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        offset = builder.mul(args[1], I64(8))
        return load(builder, builder.add(args[0], offset), I64, 8)

    return types.int64(types.int64, types.int64), codegen


@kernel
def share(count: int, thread: int, threads: int) -> Any:
    """This thread's half-open range of `count` equal pieces."""
    return count * thread // threads, count * (thread + 1) // threads
