"""How fast the queue drains, and so when a refused client should come back."""

from __future__ import annotations

from collections.abc import Callable

_HALF_LIFE_S = 30.0
_MIN_DELAY_S = 1.0
_MAX_DELAY_S = 60.0
_JITTER = 0.2  # clients that were refused together do not come back together


class DrainRate:
    """An exponentially forgetting count of requests that left the queue."""

    def __init__(self, uniform: Callable[[float, float], float]) -> None:
        """`uniform(low, high)`: the source of jitter."""
        self._uniform = uniform
        self._weight = 0.0  # of the counted requests, as of `_at`
        self._at = 0.0  # monotonic seconds

    def count(self, now: float) -> None:
        """One request left the queue."""
        self._decay(now)
        self._weight += 1.0

    def retry_after_s(self, num_ahead: int, now: float) -> float:
        """Seconds until `num_ahead` more requests will have left, with jitter; between 1 and 60 before it."""
        self._decay(now)
        per_s = self._weight * 0.6931 / _HALF_LIFE_S  # ln 2: the weight of a steady rate is rate * half-life / ln 2
        delay_s = num_ahead / per_s if per_s > 0 else _MAX_DELAY_S
        return min(max(delay_s, _MIN_DELAY_S), _MAX_DELAY_S) * self._uniform(1 - _JITTER, 1 + _JITTER)

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._weight *= 0.5 ** ((now - self._at) / _HALF_LIFE_S)
            self._at = now
