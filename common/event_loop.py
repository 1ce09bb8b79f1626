"""How a program that serves many streams runs its event loop: on the fast one, and without threads that push each other
aside or wait for each other."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

try:
    from uvloop import Loop as _FastLoop
except ImportError:  # not made for every platform
    from asyncio import SelectorEventLoop as _FastLoop  # type: ignore[assignment]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_MAX_SIGNALS = 1 << 16


def run(program: Coroutine[Any, Any, _T]) -> _T:
    """Runs a program to its end in the calling thread, and returns what it returns."""
    _let_turns_end()
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(program)


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


class _Loop(_FastLoop):
    """Reads all that gRPC's thread has signalled in one turn.

    That thread writes a byte into a socket for each event, and grpc.aio's reader takes all events, but one byte. Under
    load there is less than a turn of the loop for each event: the socket fills, the thread blocks in it, and from then
    on every call and message waits for hundreds of turns.
    """

    def add_reader(self, fd: Any, callback: Callable[[*_Ts], Any], *args: *_Ts) -> None:
        """As the loop's own."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            callback = _draining(fd, callback)
        super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Any) -> bool:
    queue = getattr(getattr(callback, "func", None), "__self__", None)
    return type(queue).__name__ == "PollerCompletionQueue"


def _draining(signals: socket.socket, callback: Callable[[*_Ts], Any]) -> Callable[[*_Ts], Any]:
    def drain(*args: *_Ts) -> None:
        # Events are there before their signals: those of all that is read are taken below, with the last byte.
        num_signals = len(signals.recv(_MAX_SIGNALS, socket.MSG_PEEK))
        if num_signals > 1:
            signals.recv(num_signals - 1)
        callback(*args)

    return drain
