"""A team of threads that walk a program together: how they start, meet, and sleep.

Python threads lend themselves to compiled code for the life of a program. A waiting thread spins for some microseconds,
then sleeps in the kernel: on a busy machine its core is then free for the thread it waits for. (The pool that torch
has would spin for milliseconds.)
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from torch import Tensor

from worker.kernels.cpu.memory import aligned_zeros
from worker.kernels.cpu.simd import I32, I64, instruction, pointer

_SPINS = 2000
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129
_EVERYBODY = 2**31 - 1

# Byte offsets in the team's memory; words that change have a cache line each.
HEAD = 0  # address of the program's head
THREADS = 8
LAUNCHES = 64  # 32 bits, counts program runs
ARRIVED = 128  # 32 bits, threads at the barrier
MEETINGS = 192  # 32 bits, counts barriers passed
SLEEPERS = 256  # 32 bits, threads asleep at the barrier
STOP = 320  # 64 bits, not 0 once the helpers must end
IDLE = 384  # 32 bits, helpers asleep between runs
_BYTES = 448


def _has_futex() -> bool:
    return sys.platform == "linux" and platform.machine() in _FUTEX_NUMBER


def _function(builder: ir.IRBuilder, name: str, result: ir.Type, num_args: int) -> ir.Function:
    found = builder.module.globals.get(name)
    return found or ir.Function(builder.module, ir.FunctionType(result, [I64] * num_args), name)


def _futex(builder: ir.IRBuilder, address: ir.Value, operation: int, value: ir.Value) -> None:
    number = I64(_FUTEX_NUMBER[platform.machine()])
    syscall = _function(builder, "syscall", I64, 7)
    builder.call(syscall, [number, address, I64(operation), builder.zext(value, I64), I64(0), I64(0), I64(0)])


def _sleep(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Sleeps while the word at `address` has that value, or yields where the kernel offers no such thing."""
    if _has_futex():
        _futex(builder, address, _FUTEX_WAIT_PRIVATE, value)
    else:
        builder.call(_function(builder, "sched_yield", I32, 0), [])


def _pause(builder: ir.IRBuilder) -> None:
    if platform.machine() == "x86_64":
        builder.call(_function(builder, "llvm.x86.sse2.pause", ir.VoidType(), 0), [])


@instruction
def atomic_load(typingctx: Any, address: Any) -> Any:
    """The 32-bit word at an address, as other threads see it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load_atomic(pointer(builder, args[0], I32), "seq_cst", 4), I64)

    return types.int64(types.int64), codegen


@instruction
def atomic_store(typingctx: Any, value: Any, address: Any) -> Any:
    """Stores a 32-bit word for other threads to see."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.trunc(args[0], I32)
        builder.store_atomic(value, pointer(builder, args[1], I32), "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@instruction
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Adds to a 32-bit word; its value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = pointer(builder, args[0], I32)
        return builder.zext(builder.atomic_rmw("add", word, builder.trunc(args[1], I32), "seq_cst"), I64)

    return types.int64(types.int64, types.int64), codegen


@instruction
def await_change(typingctx: Any, address: Any, value: Any, sleepers: Any) -> Any:
    """Waits until the 32-bit word at `address` differs from `value`; counts itself at `sleepers` while it sleeps."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, sleepers = pointer(builder, args[0], I32), pointer(builder, args[2], I32)
        value = builder.trunc(args[1], I32)
        spin, tired, rest, end = (builder.append_basic_block(n) for n in ("spin", "tired", "rest", "end"))
        entry = builder.block
        builder.branch(spin)
        builder.position_at_end(spin)
        turn = builder.phi(I32)
        turn.add_incoming(I32(0), entry)
        pausing = builder.append_basic_block("pausing")
        same = builder.icmp_signed("==", builder.load_atomic(word, "seq_cst", 4), value)
        builder.cbranch(same, pausing, end)
        builder.position_at_end(pausing)
        _pause(builder)
        following = builder.add(turn, I32(1))
        turn.add_incoming(following, pausing)
        builder.cbranch(builder.icmp_signed("<", following, I32(_SPINS)), spin, tired)
        builder.position_at_end(tired)
        builder.atomic_rmw("add", sleepers, I32(1), "seq_cst")
        builder.branch(rest)
        builder.position_at_end(rest)
        _sleep(builder, args[0], value)
        awake = builder.append_basic_block("awake")
        same = builder.icmp_signed("==", builder.load_atomic(word, "seq_cst", 4), value)
        builder.cbranch(same, rest, awake)
        builder.position_at_end(awake)
        builder.atomic_rmw("sub", sleepers, I32(1), "seq_cst")
        builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@instruction
def wake(typingctx: Any, address: Any) -> Any:
    """Wakes every thread that sleeps on the word at `address`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _has_futex():
            _futex(builder, args[0], _FUTEX_WAKE_PRIVATE, I32(_EVERYBODY))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


class Team:
    """`num_threads - 1` helper threads and the caller's own, for one compiled `void enter(tag, state, thread)`.

    `enter` must, for thread 0, run the program once, and for the others run it at every launch until told to stop.
    """

    def __init__(self, enter: Callable[[int, int], None], head: int, num_threads: int) -> None:
        self._memory = aligned_zeros(_BYTES)
        self._state = self._memory.data_ptr()
        self._enter = enter
        fields = (ctypes.c_int64 * 2).from_address(self._state)
        fields[0], fields[1] = head, num_threads
        self._helpers = [
            threading.Thread(target=_help, args=(self._enter, self._memory, index), name=f"kernel-{index}", daemon=True)
            for index in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()
        self._finalizer = weakref.finalize(self, _stop, self._enter, self._memory, self._helpers)

    def run(self) -> None:
        """Runs the program once, on all threads; other Python threads run meanwhile."""
        self._enter(self._state, 0)

    def close(self) -> None:
        """Ends the helper threads."""
        self._finalizer()


def _help(enter: Any, memory: Tensor, index: int) -> None:
    enter(memory.data_ptr(), index)


def _stop(enter: Any, memory: Tensor, helpers: list[threading.Thread]) -> None:
    ctypes.c_int64.from_address(memory.data_ptr() + STOP).value = 1
    enter(memory.data_ptr(), 0)
    for helper in helpers:
        helper.join()
