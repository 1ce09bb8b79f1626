"""How a program that serves many streams runs its event loop: on the fast one, and without threads that push each other
aside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(program: Coroutine[Any, Any, _T]) -> _T:
    """Runs a program to its end in the calling thread, and returns what it returns."""
    _let_turns_end()
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return asyncio.run(program)
    return uvloop.run(program)


def _let_turns_end() -> None:
    """Asks the kernel not to interrupt a thread that runs whenever it has woken another one.

    With every token the loop wakes gRPC's threads and other processes, and they it: where there are fewer cores than
    these, each of them would take the core from the one that woke it. Threads that are started later do the same.
    """
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except PermissionError:  # a sandbox may forbid it; all that is lost is speed
            return
