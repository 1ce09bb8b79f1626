"""What a gateway has admitted for a tenant lately, for a store that has lost its memory."""

from __future__ import annotations

from gateway.admission.shares import WINDOW_S, Use, UseState

_BUCKET_S = 900  # every time zone's day begins at a multiple of it
_KEPT_S = 25 * 3600


class RecentUse:
    """Sums by the second for a minute, and by the quarter of an hour for a day. Times: monotonic, and since 1970."""

    def __init__(self) -> None:
        self._seconds: dict[int, list[int]] = {}  # monotonic second -> requests, tokens
        self._buckets: dict[int, int] = {}  # quarter of an hour since 1970 -> tokens

    def add(self, at: float, time: float, requests: int, tokens: int) -> None:
        """Counts something that was admitted then; negative to take back."""
        second = self._seconds.setdefault(int(at), [0, 0])
        second[0] += requests
        second[1] += tokens
        bucket = int(time // _BUCKET_S)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + tokens

    def forget_old(self, now: float, time: float) -> None:
        """Drops what no limit looks at any more."""
        self._seconds = {at: sums for at, sums in self._seconds.items() if at > now - WINDOW_S - 1}
        self._buckets = {at: tokens for at, tokens in self._buckets.items() if at * _BUCKET_S > time - _KEPT_S}

    def sums(self, now: float, time: float) -> list[Use]:
        """All of it, for the store: at the ends of the seconds and quarters, as it was never later than that."""
        window = [
            Use("", min(second + 1.0, now), requests, tokens, UseState.OF_WINDOW)
            for second, (requests, tokens) in self._seconds.items()
            if requests or tokens
        ]
        day = [
            Use("", now - max(time - ((bucket + 1) * _BUCKET_S - 1), 0.0), 0, tokens, UseState.OF_DAY)
            for bucket, tokens in self._buckets.items()
            if tokens
        ]
        return window + day
