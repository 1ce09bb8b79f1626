from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from common import event_loop


async def policies() -> tuple[int, int]:
    """Of the thread of the loop, and of one that is started in it."""
    found: list[int] = []
    thread = Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return os.sched_getscheduler(0), found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such policy")
def test_no_thread_of_a_program_pushes_another_aside() -> None:
    with ThreadPoolExecutor(1) as other:  # so that the tests' own thread stays as it is
        assert other.submit(lambda: event_loop.run(policies())).result() == (os.SCHED_BATCH, os.SCHED_BATCH)


def test_a_sandbox_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer() -> int:
        return 42

    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: event_loop.run(answer())).result() == 42
