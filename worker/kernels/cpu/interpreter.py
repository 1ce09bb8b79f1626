"""Runs a recorded program: one compiled call per step, in which every thread walks the records."""

from __future__ import annotations

from typing import Any

import torch
from numba import cfunc, types

from worker.kernels.cpu import team
from worker.kernels.cpu.attention import attention, merge_partials
from worker.kernels.cpu.layout import HEAD_NUM_RECORDS, HEAD_RECORDS, HEAD_TOKENS, RECORD_BYTES, Op, field
from worker.kernels.cpu.linear import embed, linear
from worker.kernels.cpu.plan import make_plan
from worker.kernels.cpu.rowwise import rms_norm, rope_store
from worker.kernels.cpu.simd import BF16, F32, kernel, load_i64
from worker.kernels.cpu.team import atomic_add, atomic_load, atomic_store, await_change, wake

_EMBED, _RMS_NORM, _LINEAR, _ROPE_STORE, _PLAN, _ATTENTION, _MERGE = (int(op) for op in Op)
_HEAD, _THREADS, _STOP = team.HEAD, team.THREADS, team.STOP
_LAUNCHES, _ARRIVED, _MEETINGS, _SLEEPERS = team.LAUNCHES, team.ARRIVED, team.MEETINGS, team.SLEEPERS


@kernel
def _meet(state: int, threads: int) -> Any:
    """Nobody leaves before all have come."""
    if threads == 1:
        return
    meeting = atomic_load(state + _MEETINGS)
    if atomic_add(state + _ARRIVED, 1) == threads - 1:
        atomic_store(0, state + _ARRIVED)
        atomic_store(meeting + 1, state + _MEETINGS)
        if atomic_load(state + _SLEEPERS) > 0:
            wake(state + _MEETINGS)
    else:
        await_change(state + _MEETINGS, meeting, state + _SLEEPERS)


@kernel
def _walk(tag: Any, state: int, thread: int) -> Any:
    head, threads = load_i64(state + _HEAD), load_i64(state + _THREADS)
    for i in range(field(head, HEAD_NUM_RECORDS)):
        record = field(head, HEAD_RECORDS) + i * RECORD_BYTES
        op = field(record, 0)
        if op == _LINEAR:
            linear(tag, record, head, thread, threads)
        elif op == _RMS_NORM:
            rms_norm(tag, record, head, thread, threads)
        elif op == _ROPE_STORE:
            rope_store(tag, record, head, thread, threads)
        elif op == _ATTENTION:
            attention(tag, record, head, thread)
        elif op == _MERGE:
            merge_partials(tag, record, head, thread, threads)
        elif op == _PLAN:
            make_plan(record, head, thread, threads)
        elif op == _EMBED:
            embed(tag, record, field(head, HEAD_TOKENS), thread, threads)
        _meet(state, threads)


@kernel
def _enter(tag: Any, state: int, thread: int) -> Any:
    """Thread 0 launches one run and takes part in it; the others take part in every run until told to stop."""
    launches = 0
    while True:
        if thread == 0:
            atomic_store(atomic_load(state + _LAUNCHES) + 1, state + _LAUNCHES)
            wake(state + _LAUNCHES)
        else:
            await_change(state + _LAUNCHES, launches, state + _STOP + 8)
            launches = atomic_load(state + _LAUNCHES)
        if load_i64(state + _STOP) != 0:
            return
        _walk(tag, state, thread)
        if thread == 0:
            return


def _enter_f32(state: int, thread: int) -> Any:
    _enter(F32, state, thread)


def _enter_bf16(state: int, thread: int) -> Any:
    _enter(BF16, state, thread)


def compile_enter(dtype: torch.dtype) -> int:
    """The address of the compiled `void enter(int64 state, int64 thread)` for a model dtype; kept for the process."""
    function = {torch.float32: _enter_f32, torch.bfloat16: _enter_bf16}[dtype]
    compiled: Any = cfunc(types.void(types.int64, types.int64), cache=True)(function)
    _compiled.append(compiled)
    return int(compiled.address)


_compiled: list[object] = []
