"""Runs a recorded program: one compiled call per step, in which every thread walks the records."""

from __future__ import annotations

from typing import Any

from worker.kernels.cpu import team
from worker.kernels.cpu.compile import call_kernel
from worker.kernels.cpu.layout import HEAD_NUM_RECORDS, HEAD_RECORDS, KERNEL, RECORD_BYTES, field
from worker.kernels.cpu.simd import kernel, load_i64
from worker.kernels.cpu.team import atomic_add, atomic_load, atomic_store, await_change, wake

_HEAD, _THREADS, _STOP, _IDLE = team.HEAD, team.THREADS, team.STOP, team.IDLE
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
        call_kernel(tag, field(record, KERNEL), record, head, thread, threads)
        _meet(state, threads)


def enter(tag: Any, state: int, thread: int) -> None:
    """Thread 0 launches one run and takes part in it; the others take part in every run until told to stop."""
    launches = 0
    while True:
        if thread == 0:
            atomic_store(atomic_load(state + _LAUNCHES) + 1, state + _LAUNCHES)
            if atomic_load(state + _IDLE) > 0:
                wake(state + _LAUNCHES)
        else:
            await_change(state + _LAUNCHES, launches, state + _IDLE)
            launches = atomic_load(state + _LAUNCHES)
        if load_i64(state + _STOP) != 0:
            return
        _walk(tag, state, thread)
        if thread == 0:
            return
