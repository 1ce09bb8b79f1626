"""When a session takes a silent worker for lost, on an event loop that is late."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gateway.placement.worker import WorkerState
from gateway.rpc import worker_session
from gateway.rpc.worker_session import GrpcWorkerSession, SessionSettings

SILENCE_S = 2.5


class LateLoop:
    """Every sleep ends late by the next of some durations, the last of them for ever."""

    def __init__(self, late_s: list[float]) -> None:
        self.now_s = 100.0
        self._late_s = late_s

    def time(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s + (self._late_s.pop(0) if len(self._late_s) > 1 else self._late_s[0])


async def noticed_after_s(monkeypatch: pytest.MonkeyPatch, late_s: list[float]) -> float:
    loop = LateLoop(late_s)
    time_only = SimpleNamespace(get_running_loop=lambda: loop, sleep=loop.sleep, Queue=Mock)
    monkeypatch.setattr(worker_session, "asyncio", time_only)
    session = GrpcWorkerSession(Mock(), Mock(), Mock(), SessionSettings("g1", "", SILENCE_S, 30.0, 10.0), Mock())
    session._state = WorkerState.READY
    call = Mock()
    await session._watch(call)
    call.cancel.assert_called_once_with()
    return loop.now_s - 100.0


@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.45])
async def test_a_loop_that_is_always_late_is_so_once(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    assert await noticed_after_s(monkeypatch, [late_s]) == pytest.approx(SILENCE_S + late_s)


async def test_a_stall_of_the_program_is_no_silence_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await noticed_after_s(monkeypatch, [10.0, 0.0]) == pytest.approx(10.5 + 4 * SILENCE_S / 5)
