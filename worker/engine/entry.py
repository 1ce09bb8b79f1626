"""When may waiting requests enter, and when do ended ones leave?"""

from __future__ import annotations

from typing import Protocol

from worker.engine.budget import Budget
from worker.engine.config import SchedulerConfig
from worker.engine.request import Request
from worker.engine.waiting import WaitingList

UNLIMITED = 1 << 62


class Entry(Protocol):
    """Opens the door for waiting requests."""

    def num_tokens(self, waiting: WaitingList, num_running: int, budget: Budget, now_s: float) -> int:
        """Tokens of first chunks that may enter in this step, should slots and memory allow it; the last chunk may
        reach beyond."""
        ...

    def pause_s(self, waiting: WaitingList, num_running: int, now_s: float) -> float:
        """Seconds until a step can have work; 0 if it has already."""
        ...


class Continuous:
    """In every step, as many as can have a first chunk in it."""

    def __init__(self, config: SchedulerConfig) -> None:
        del config

    def num_tokens(self, waiting: WaitingList, num_running: int, budget: Budget, now_s: float) -> int:
        """See Entry."""
        del waiting, num_running, now_s
        return budget.num_tokens()

    def pause_s(self, waiting: WaitingList, num_running: int, now_s: float) -> float:
        """See Entry."""
        del waiting, num_running, now_s
        return 0.0


class Batchwise:
    """Whoever waits when nothing runs any more."""

    def __init__(self, config: SchedulerConfig) -> None:
        del config

    def num_tokens(self, waiting: WaitingList, num_running: int, budget: Budget, now_s: float) -> int:
        """See Entry."""
        del waiting, budget, now_s
        return 0 if num_running else UNLIMITED

    def pause_s(self, waiting: WaitingList, num_running: int, now_s: float) -> float:
        """See Entry."""
        del waiting, num_running, now_s
        return 0.0


class Gathered:
    """A batch that waits for others until there are enough, or its first request has waited long enough."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._gather_s = config.gather_s
        self._count = config.gather_count or config.max_num_seqs

    def num_tokens(self, waiting: WaitingList, num_running: int, budget: Budget, now_s: float) -> int:
        """See Entry."""
        del budget
        return 0 if num_running or self.pause_s(waiting, num_running, now_s) > 0 else UNLIMITED

    def pause_s(self, waiting: WaitingList, num_running: int, now_s: float) -> float:
        """See Entry."""
        first = waiting.first(1)
        if num_running or not first or len(waiting) >= self._count:
            return 0.0
        return max(0.0, first[0].arrived_s + self._gather_s - now_s)


class Departure(Protocol):
    """Decides which of the ended requests give back slot and blocks now."""

    def leaving(self, ended: list[Request], num_running: int) -> list[Request]:
        """Those that leave, of these and earlier ones; `num_running` are left."""
        ...


class AtOnce:
    """Everybody leaves when it ends."""

    def leaving(self, ended: list[Request], num_running: int) -> list[Request]:
        """See Departure."""
        del num_running
        return ended


class Together:
    """A batch leaves when its last request ends; until then each keeps what it holds."""

    def __init__(self) -> None:
        self._staying: list[Request] = []

    def leaving(self, ended: list[Request], num_running: int) -> list[Request]:
        """See Departure."""
        self._staying += ended
        if num_running:
            return []
        leaving, self._staying = self._staying, []
        return leaving
