"""How much memory will the running requests need at most, and how much of the work is done twice?"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from worker.engine.request import Request

_MEMORY = 32
"""Finished requests that the learned share looks back on."""


class OutputForecast:
    """Learns which share of their max_tokens requests use, and expects the same share of what is left to each."""

    def __init__(self, optimism: float, first_guess: float) -> None:
        """`optimism`: 0 expects that everybody uses all, 1 what was learned; `first_guess` is the share until then."""
        self._optimism = optimism
        self._learned = first_guess

    def observe(self, request: Request) -> None:
        """Learns from a request that ended by itself."""
        most = request.max_total_tokens - request.num_prompt_tokens
        self._learned += (request.num_output_tokens / max(1, most) - self._learned) / _MEMORY

    def share(self, distrust: float) -> float:
        """Share of what is left that a request is expected to use; `distrust` 1 expects all of it, 0 as configured."""
        return self._learned + (1 - self._learned) * max(1 - self._optimism, min(1.0, distrust))


def num_expected(request: Request, share: float) -> int:
    """Tokens that a request is expected to generate yet, at least 1."""
    return int(share * (request.max_total_tokens - len(request.token_ids))) + 1


class MemoryForecast:
    """The peak of the memory that a set of requests will hold, as LightLLM's Past-Future scheduler computes it.

    With the requests ordered by the tokens they have yet to generate, most first, the moments of most memory are those
    at which one ends: then the first i are left, each with what it held and the remaining_i tokens of the one that
    ends. The peak is the maximum over i of remaining_i * i + (held by the first i).
    """

    def __init__(self, loads: Iterable[tuple[int, int]]) -> None:
        """`loads`: (remaining, held) tokens of each request."""
        self._loads = sorted(loads, reverse=True)
        self._bound = sum(remaining + held for remaining, held in self._loads)

    def add(self, remaining: int, held: int) -> None:
        """One more request."""
        insort(self._loads, (remaining, held), key=_descending)
        self._bound += remaining + held

    def remove(self, remaining: int, held: int) -> None:
        """One request less. Raises ValueError if there is none with this load."""
        self._loads.pop(self._index(remaining, held))
        self._bound -= remaining + held

    def fits(self, remaining: int, held: int, capacity: int, without: Sequence[tuple[int, int]] = ()) -> bool:
        """Whether the peak with one more request is at most `capacity` tokens, with these loads out of the way."""
        if self.surely_fits(remaining, held, capacity, without):
            return True
        changed = MemoryForecast(())
        changed._loads = self._loads.copy()
        for load in without:
            changed.remove(*load)
        changed.add(remaining, held)
        return peak_tokens(changed._loads) <= capacity

    def surely_fits(self, remaining: int, held: int, capacity: int, without: Sequence[tuple[int, int]] = ()) -> bool:
        """The same, if everybody were at its end at once: no need to look closer."""
        return self._bound + remaining + held - sum(map(sum, without)) <= capacity

    def _index(self, remaining: int, held: int) -> int:
        index = bisect_left(self._loads, (-remaining, -held), key=_descending)
        if index == len(self._loads) or self._loads[index] != (remaining, held):
            raise ValueError(f"no request has {remaining} tokens to come and holds {held}")
        return index


def _descending(load: tuple[int, int]) -> tuple[int, int]:
    return -load[0], -load[1]


def peak_tokens(loads: Iterable[tuple[int, int]]) -> int:
    """The peak of (remaining, held) tokens in order of remaining, most first; 0 without any."""
    peak = total = 0
    for count, (remaining, held) in enumerate(loads, 1):
        total += held
        peak = max(peak, remaining * count + total)
    return peak


class ThrashMeter:
    """The share of recently computed tokens that had been computed before and were lost to a preemption."""

    def __init__(self, memory_steps: int = 200) -> None:
        self._decay = 1 - 1 / memory_steps
        self._recomputed = 0.0
        self._computed = 0.0

    @property
    def ratio(self) -> float:
        """Recomputed / computed; 0 if nothing was computed."""
        return min(1.0, self._recomputed / self._computed) if self._computed else 0.0

    def observe(self, num_computed: int, num_recomputed: int) -> None:
        """Counts one step."""
        self._recomputed = self._recomputed * self._decay + num_recomputed
        self._computed = self._computed * self._decay + num_computed
