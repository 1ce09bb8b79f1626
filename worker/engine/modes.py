"""The five ways of batching, each a choice of policies: this table is all that they differ in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from worker.cache.manager import CacheManager
from worker.engine.budget import Budget, TimeBudget, TokenBudget
from worker.engine.config import SchedulerConfig
from worker.engine.entry import AtOnce, Batchwise, Continuous, Departure, Entry, Gathered, Together
from worker.engine.levels import Levels, OneLevel, ThreeLevels
from worker.engine.memory import LookAhead, Memory, Reserve


@dataclass(frozen=True, slots=True)
class Mode:
    """Makes the policies of one scheduler."""

    entry: Callable[[SchedulerConfig], Entry]
    departure: Callable[[], Departure]
    memory: Callable[[CacheManager, SchedulerConfig], Memory]
    levels: Callable[[SchedulerConfig], Levels]
    budget: Callable[[SchedulerConfig], Budget]
    prefix_cache: bool  # whether whoever builds the manager may switch it on


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        # A batch enters together and leaves together, each request with its maximum length reserved in one piece.
        "static": Mode(Batchwise, Together, Reserve, OneLevel, TokenBudget, prefix_cache=False),
        # The same, and a batch gathers for a time or a count before it enters, as a batching client does it.
        "client": Mode(Gathered, Together, Reserve, OneLevel, TokenBudget, prefix_cache=False),
        # Requests enter and leave in every step.
        "continuous": Mode(Continuous, AtOnce, Reserve, OneLevel, TokenBudget, prefix_cache=False),
        # They get blocks as they grow.
        "paged": Mode(Continuous, AtOnce, LookAhead, OneLevel, TokenBudget, prefix_cache=False),
        # They share prefixes, steps are bounded in time, first chunks come first and long requests yield.
        "full": Mode(Continuous, AtOnce, LookAhead, ThreeLevels, TimeBudget, prefix_cache=True),
    }
)

DEFAULT_MODE = "full"
