"""How long will a step take? A linear model of what it reads and computes, fitted to the steps that were measured."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from common.window import Windows


class StepLoad(NamedTuple):
    """What makes a step take its time."""

    num_tokens: int  # computed: they pass through all weights
    num_kv_tokens: float  # attended to, summed over the computed tokens
    num_rows: int  # requests


def chunk_kv_tokens(start: int, count: int, windows: Windows = ()) -> float:
    """Tokens attended to by `count` tokens from position `start` on: by each itself and all before it, or what it sees
    of them; with several `windows` the mean."""
    everything = count * start + count * (count + 1) // 2
    if not windows:
        return everything
    seen = 0
    for window in windows:
        num_hidden = 0 if window is None else max(0, start + count - window.num_seen)  # of the last token
        num_short = min(count, num_hidden)  # tokens that see less than all
        seen += everything - num_short * num_hidden + num_short * (num_short - 1) // 2
    return seen / len(windows)


_SCALES = (1.0, 64.0, 16384.0, 64.0)
"""One, tokens, KV tokens, rows of a typical step: brings the features to the same magnitude."""

_PRIOR_S = (0.0, 0.03, 0.0, 0.0)
"""Seconds per feature before anything is measured: about half a millisecond per token, so first steps are small."""

_ANCHOR = 1.0
"""Weight of the present coefficients, in observations: what recent steps did not excite keeps its value."""

_SWEEPS = 3
_MAX_SURPRISE = 3.0
"""A step may count as at most so many times its prediction: a pause of the machine is no cost of the work."""

_MIN_SURPRISE_S = 0.002


class CostModel:
    """seconds = c0 + c1 tokens + c2 KV tokens + c3 rows, with every c >= 0.

    Least squares over all steps, older ones weighing exponentially less (recursive least squares with forgetting:
    Ljung, System Identification, 2nd ed., section 11.2), kept as normal equations and solved under c >= 0 by a few
    sweeps of coordinate descent from the last solution (Franc, Hlavac, Navara: Sequential coordinate-wise algorithm for
    the non-negative least squares problem, 2005). The anchor keeps the equations solvable where steps are all alike.
    """

    def __init__(self, forgetting: float = 0.995) -> None:
        """`forgetting`: weight of a step relative to the one after it, between 0 and 1."""
        if not 0 < forgetting < 1:
            raise ValueError(f"forgetting is {forgetting}, allowed is between 0 and 1")
        self._forgetting = forgetting
        self._coefficients = list(_PRIOR_S)
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4

    @property
    def fixed_s(self) -> float:
        """Seconds that a step takes whatever it computes: all weights are read once."""
        return self._coefficients[0]

    def predict(self, load: StepLoad) -> float:
        """Seconds that a step of this load should take."""
        return sum(c * x for c, x in zip(self._coefficients, _features(load), strict=True))

    def chunk_s(self, start: int, count: int, *, is_new_row: bool, windows: Windows = ()) -> float:
        """Seconds that `count` tokens from position `start` on add to a step."""
        _, per_token, per_kv, per_row = self._slopes()
        return count * per_token + chunk_kv_tokens(start, count, windows) * per_kv + is_new_row * per_row

    def num_affordable(self, start: int, seconds: float, *, is_new_row: bool) -> int:
        """The most tokens from position `start` on that add no more than so many seconds; a free token is 2**31."""
        _, per_token, per_kv, per_row = self._slopes()
        left = seconds - is_new_row * per_row
        if left <= 0:
            return 0
        linear, square = per_token + per_kv * (start + 0.5), per_kv / 2  # linear n + square n^2 <= left
        root = linear + sqrt(linear * linear + 4 * square * left)
        return int(min(2 * left / root, 1 << 31)) if root > 0 else 1 << 31

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learns from a measured step."""
        x = _features(load)
        seconds = min(seconds, max(_MAX_SURPRISE * self.predict(load), _MIN_SURPRISE_S))
        for i in range(4):
            row, xi = self._moments[i], x[i]
            for j in range(4):
                row[j] = row[j] * self._forgetting + xi * x[j]
            self._targets[i] = self._targets[i] * self._forgetting + xi * seconds
        anchor = tuple(self._coefficients)
        for _ in range(_SWEEPS):
            for i in range(4):
                self._solve_one(i, anchor[i])

    def _solve_one(self, i: int, anchor: float) -> None:
        """The best coefficient `i` with the others as they are."""
        row, c = self._moments[i], self._coefficients
        others = sum(row[j] * c[j] for j in range(4)) - row[i] * c[i]
        c[i] = max(0.0, (self._targets[i] - others + _ANCHOR * anchor) / (row[i] + _ANCHOR))

    def _slopes(self) -> tuple[float, float, float, float]:
        one, tokens, kv, rows = self._coefficients
        return one, tokens / _SCALES[1], kv / _SCALES[2], rows / _SCALES[3]

    def __repr__(self) -> str:
        one, tokens, kv, rows = (1e6 * each for each in self._slopes())
        return f"CostModel({one:.0f} + {tokens:.1f} tokens + {kv:.4f} KV tokens + {rows:.1f} rows, in microseconds)"


def _features(load: StepLoad) -> tuple[float, float, float, float]:
    return (1.0, load.num_tokens / _SCALES[1], load.num_kv_tokens / _SCALES[2], load.num_rows / _SCALES[3])
