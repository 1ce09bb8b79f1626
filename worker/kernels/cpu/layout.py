"""Where the compiled kernels find their operands: records of 64-bit fields, written by Python, read by number."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from worker.kernels.cpu.simd import kernel, load_i64

FIELDS = 24
"""Fields of one recorded kernel."""

RECORD_BYTES = 8 * FIELDS
SCRATCH_BYTES = 64 * 1024
"""Working memory of one thread."""

# The head of a program.
HEAD_RECORDS, HEAD_NUM_RECORDS, HEAD_TOKENS, HEAD_ROWS, HEAD_SAMPLES, HEAD_SCRATCH, HEAD_PLAN, HEAD_PARTIALS = range(8)
HEAD_FIELDS = 8


class Op(IntEnum):
    """What a record does; its first field."""

    EMBED = 0
    RMS_NORM = 1
    LINEAR = 2
    ROPE_STORE = 3
    PLAN = 4
    ATTENTION = 5
    MERGE = 6


@kernel
def field(record: int, index: int) -> Any:
    """A field of the record at this address."""
    return load_i64(record + 8 * index)


@kernel
def share(count: int, thread: int, threads: int) -> Any:
    """This thread's half-open range of `count` equal pieces."""
    return count * thread // threads, count * (thread + 1) // threads
