"""A store's time that a test sets, in place of the server's."""

from __future__ import annotations

import redis

from gateway.store.connection import read_script

START_S = 1_800_000_000.0
_CLOCK = """
local function read_clock() return tonumber(redis.call('GET', ARGV[1] .. 'clock')) end
"""


def read_script_with_set_clock(name: str) -> str:
    """The text of a script that takes its time from the key `clock` of the pool."""
    return _CLOCK if name == "clock" else read_script(name)


class StoreClock:
    """The clock of one pool."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self._client, self._key = client, f"tidegate:{{{pool}}}:clock"
        self.set(START_S)

    def set(self, now_s: float) -> None:
        """Seconds since 1970, kept to the microsecond."""
        self.now_s = now_s
        self._client.set(self._key, round(now_s * 1e6))

    def advance(self, seconds: float) -> None:
        self.set(self.now_s + seconds)

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s
