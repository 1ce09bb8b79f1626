"""Time as a parameter: one clock port, one real clock, one that tests set."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""
        ...

    def time(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def time(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        return time.time()
