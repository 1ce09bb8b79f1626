from __future__ import annotations

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from worker.rpc import watchdog

MAX_AGE_S = 0.3


class Engine:
    """Its last progress was when the object was made, or never if it is idle."""

    def __init__(self) -> None:
        self.is_idle = False
        self.last_progress = time.monotonic()

    @property
    def age_s(self) -> float:
        return 0.0 if self.is_idle else time.monotonic() - self.last_progress


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.02)


async def test_a_loop_that_hangs_is_told_until_it_goes_on() -> None:
    engine = Engine()
    told: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(watchdog.watch_loop(engine, MAX_AGE_S, told.put))  # type: ignore[arg-type]
    with capture_logs() as logs:
        assert await told.get() is False
        assert engine.age_s > MAX_AGE_S
        engine.is_idle = True
        assert await told.get() is True
    watching.cancel()
    assert [entry["event"] for entry in logs] == ["engine_loop_hangs", "engine_loop_recovered"]


async def test_a_process_that_stood_still_is_no_loop_that_hangs() -> None:
    """As SIGSTOP, or a machine that sleeps, does to all of its threads."""
    engine = Engine()
    told: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(watchdog.watch_loop(engine, MAX_AGE_S, told.put))  # type: ignore[arg-type]
    for _ in range(3):
        await asyncio.sleep(0)
        engine.last_progress = time.monotonic()  # since the last look, or after all
        time.sleep(2 * MAX_AGE_S)  # noqa: ASYNC251 - nothing runs meanwhile
        await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        assert told.empty()
        time.sleep(2 * MAX_AGE_S)  # noqa: ASYNC251 - without any progress since
        await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        assert told.empty()
    assert await told.get() is False, "it still hangs"
    watching.cancel()
