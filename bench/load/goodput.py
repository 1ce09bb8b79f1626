"""Which requests were served well, and the search for the highest rate at which enough of them are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from bench.load.record import Record


class GoodputError(ValueError):
    """A rule that cannot be used; the message says what was wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class GoodputRule:
    """Upper limits in milliseconds, all of which a good request keeps; None: any value is good."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every completed request is good."""
        return self == GoodputRule()

    def is_good(self, record: Record) -> bool:
        """Whether the request was completed within all limits; the TPOT of a one-token answer counts as 0."""
        if not record.is_completed:
            return False
        measured = ((self.ttft_ms, record.ttft_s), (self.tpot_ms, record.tpot_s or 0.0), (self.e2el_ms, record.e2e_s))
        return all(limit is None or (value is not None and value * 1e3 <= limit) for limit, value in measured)

    def to_json(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def __str__(self) -> str:
        names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2E"}
        limits = [f"{names[name]} ≤ {limit:g} ms" for name, limit in self.to_json().items()]
        return " and ".join(limits) or "completed"


def parse_rule(parts: Iterable[str]) -> GoodputRule:
    """`ttft:2000`, `tpot:100`, `e2el:20000`, each at most once, in milliseconds. Raises GoodputError."""
    limits: dict[str, float] = {}
    for part in parts:
        name, _, text = part.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = 0.0
        if name not in ("ttft", "tpot", "e2el") or limit <= 0 or f"{name}_ms" in limits:
            raise GoodputError(f"{part!r}: a goodput limit is ttft:MS, tpot:MS or e2el:MS, each once, as in ttft:2000")
        limits[f"{name}_ms"] = limit
    return GoodputRule(**limits)


@dataclass(frozen=True, slots=True)
class Judged:
    """A rate that was tried, in requests a second, and the share of its requests that were good."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """Doubles (or halves) the rate until it is bracketed, then bisects in the logarithm.

    The capacity is the highest rate tried whose attainment reaches `target`, with no lower one that fails.
    """

    start: float  # requests a second, tried first
    target: float = 0.9  # least share of good requests, of all that were sent
    max_points: int = 8  # rates tried at most
    precision: float = 1.15  # it is enough that the lowest failing rate is within this factor of the capacity

    def next_rate(self, tried: Sequence[Judged]) -> float | None:
        """The rate to try next; None: the search is over."""
        if not tried:
            return self.start
        if len(tried) >= self.max_points:
            return None
        best, worst = self.capacity(tried), self._lowest_failing(tried)
        if worst is None:
            return max(each.rate for each in tried) * 2
        if best is None:
            return worst / 2
        return None if worst / best <= self.precision else (best * worst) ** 0.5

    def capacity(self, tried: Sequence[Judged]) -> float | None:
        """The highest rate that can be served, as far as is known; None: none that was tried."""
        worst = self._lowest_failing(tried)
        served = [each.rate for each in tried if each.attainment >= self.target]
        return max((rate for rate in served if worst is None or rate < worst), default=None)

    def _lowest_failing(self, tried: Sequence[Judged]) -> float | None:
        return min((each.rate for each in tried if each.attainment < self.target), default=None)
