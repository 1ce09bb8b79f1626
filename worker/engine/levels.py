"""Who goes first in a step, and who has run so long that it yields?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from worker.engine.budget import Budget
from worker.engine.config import SchedulerConfig
from worker.engine.request import Request

NEVER = 1 << 62
"""Steps that nobody reaches."""

Chunk = tuple[Request, int]


class Level(IntEnum):
    """A request's level in a step; the smaller number is served first."""

    FIRST_CHUNK = 1  # nothing of it was ever computed
    DECODE = 2  # or its further chunks
    LONG = 3  # decodes for long: preemptible


class Levels(Protocol):
    """Answers for one request at a time; `step` is the scheduler's running number, `now_s` the time it began."""

    long_after_steps: int
    can_pause: bool  # whether paused requests make way; else there is no pausing

    def level(self, request: Request) -> Level:
        """Its level now."""
        ...

    def is_exhausted(self, request: Request) -> bool:
        """Whether it was preempted as often as it may be."""
        ...

    def is_in_grace(self, request: Request, step: int) -> bool:
        """Whether it was resumed just now."""
        ...

    def may_yield(self, request: Request, step: int) -> bool:
        """Whether a long request gives way to newcomers."""
        ...

    def is_urgent(self, request: Request, step: int, now_s: float) -> bool:
        """Whether a waiting request may make others yield."""
        ...

    def share(self, unfinished: Sequence[Request], budget: Budget) -> list[Chunk]:
        """Chunks for the running requests, by arrival, that miss more than one token."""
        ...


class ThreeLevels:
    """First chunks before further ones, and long requests yield to them."""

    can_pause = True

    def __init__(self, config: SchedulerConfig) -> None:
        self.long_after_steps = config.long_after_steps
        self._config = config

    def level(self, request: Request) -> Level:
        """See Levels."""
        if request.started_s is None:
            return Level.FIRST_CHUNK
        return Level.LONG if num_decode_steps(request) > self.long_after_steps else Level.DECODE

    def is_exhausted(self, request: Request) -> bool:
        """See Levels."""
        return request.num_preemptions >= self._config.max_preemptions

    def is_in_grace(self, request: Request, step: int) -> bool:
        """See Levels."""
        return request.num_preemptions > 0 and step - request.entry_step < self._config.grace_steps

    def may_yield(self, request: Request, step: int) -> bool:
        """See Levels. Not while it has waited for more than half the steps that it has run."""
        if self.is_exhausted(request) or self.is_in_grace(request, step):
            return False
        num_waited = request.num_waited_steps
        return 2 * num_waited <= step - request.first_step - num_waited

    def is_urgent(self, request: Request, step: int, now_s: float) -> bool:
        """See Levels. A fresh one is if its first chunk would be late after one more step, one that had to leave if it
        has waited for more than half the steps that it has run."""
        if request.num_preemptions:
            num_ran = request.left_step - request.first_step - request.num_waited_steps
            return 2 * (request.num_waited_steps + step - request.left_step) > num_ran
        return now_s + self._config.step_budget_s > request.arrived_s + self._config.first_chunk_s

    def share(self, unfinished: Sequence[Request], budget: Budget) -> list[Chunk]:
        """Every first chunk gets the minimum, earliest deadline first; then every further one, so that no long prompt
        keeps short ones from their end; then everybody more, first come first served.

        The deadline is the arrival plus a constant, so its order is that of arrival.
        """
        fresh = [request for request in unfinished if request.started_s is None]
        smallest = self._config.min_chunk_tokens
        if fresh:
            smallest = max((smallest + 1) // 2, min(smallest, budget.num_tokens() // len(fresh)))
        chunks: dict[int, Chunk] = {}
        most = min(smallest, self._config.max_chunk_tokens)
        _extend(chunks, fresh, budget, most)
        _extend(chunks, unfinished, budget, most)
        _extend(chunks, unfinished, budget, self._config.max_chunk_tokens)
        return list(chunks.values())


class OneLevel:
    """First come, first served; nobody yields to a newcomer."""

    long_after_steps = NEVER
    can_pause = False

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_chunk = config.max_chunk_tokens

    def level(self, request: Request) -> Level:
        """See Levels."""
        return Level.FIRST_CHUNK if request.started_s is None else Level.DECODE

    def is_exhausted(self, request: Request) -> bool:
        """See Levels."""
        del request
        return False

    def is_in_grace(self, request: Request, step: int) -> bool:
        """See Levels."""
        del request, step
        return False

    def may_yield(self, request: Request, step: int) -> bool:
        """See Levels."""
        del request, step
        return False

    def is_urgent(self, request: Request, step: int, now_s: float) -> bool:
        """See Levels."""
        del request, step, now_s
        return False

    def share(self, unfinished: Sequence[Request], budget: Budget) -> list[Chunk]:
        """See Levels."""
        chunks: dict[int, Chunk] = {}
        _extend(chunks, unfinished, budget, self._max_chunk)
        return list(chunks.values())


def num_decode_steps(request: Request) -> int:
    """Decode steps since it was admitted or resumed: each knows one more token."""
    return len(request.token_ids) - request.entry_tokens


def _extend(chunks: dict[int, Chunk], requests: Iterable[Request], budget: Budget, most: int) -> None:
    """Takes from the budget for each request in turn, up to `most` tokens of each in all, until nothing is left."""
    for request in requests:
        _, given = chunks.get(request.arrival, (request, 0))
        start = request.num_computed + given
        wanted = min(len(request.token_ids) - start, most - given)
        if wanted <= 0:
            continue
        granted = budget.take(start, wanted, is_new_row=not given, is_first=not chunks, windows=request.windows)
        if not granted:
            break
        chunks[request.arrival] = (request, given + granted)
