"""How much may one step compute? In tokens, or in time as the cost model sees it."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from common.window import Windows
from worker.engine.config import SchedulerConfig
from worker.engine.cost_model import CostModel, StepLoad, chunk_kv_tokens

MIN_CHUNK_SHARE = 0.25
"""Of a step's time, kept for chunks even if the decodes take all of it: prompts advance, and gaps stay bounded."""

MAX_FIXED_SHARE = 0.125
"""Of a step's time, what it takes whatever it computes. Where that would be more, steps are longer than the budget, for
they would spend their time on reading weights; but not longer than a newcomer may wait for its first chunk."""


class Budget(Protocol):
    """One step's budget: opened with the decodes, which ride in any case, then taken from chunk by chunk."""

    def open(self, num_decodes: int, num_kv_tokens: float) -> None:
        """Begins a step in which so many requests decode, attending to so many tokens."""
        ...

    def take(
        self, start: int, wanted: int, *, is_new_row: bool = True, is_first: bool = False, windows: Windows = ()
    ) -> int:
        """Tokens granted to a chunk from position `start` on, `wanted` or less; the first of a step gets one at least.

        `is_new_row` is false where the request has a chunk in this step already; `windows` is what the chunk's tokens
        see, if not everything.
        """
        ...

    def num_tokens(self) -> int:
        """Tokens of first chunks that still fit; at least 1 if the decodes left any, for prompts must advance."""
        ...

    def observe(self, seconds: float) -> None:
        """Learns what the step took that was opened last."""
        ...

    def recompute_s(self, start: int, count: int, windows: Windows = ()) -> float:
        """Seconds that it takes to compute so many tokens from position `start` on; 0 if nobody measures them."""
        ...


class TokenBudget:
    """A number of tokens, however long they take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_tokens = config.max_num_batched_tokens
        self._left = 0

    def open(self, num_decodes: int, num_kv_tokens: float) -> None:
        """See Budget."""
        del num_kv_tokens
        self._left = self._max_tokens - num_decodes

    def take(
        self, start: int, wanted: int, *, is_new_row: bool = True, is_first: bool = False, windows: Windows = ()
    ) -> int:
        """See Budget."""
        del start, is_new_row, is_first, windows
        granted = min(wanted, self._left)
        self._left -= granted
        return granted

    def num_tokens(self) -> int:
        """See Budget."""
        return self._left

    def observe(self, seconds: float) -> None:
        """See Budget."""

    def recompute_s(self, start: int, count: int, windows: Windows = ()) -> float:
        """See Budget."""
        del start, count, windows
        return 0.0


class TimeBudget:
    """A number of seconds by the cost model, and of tokens, which bounds the step's memory.

    It is `step_budget_s`, and up to `first_chunk_s` where a step's fixed costs would be too large a share of it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.cost = CostModel()
        self._budget_s = config.step_budget_s
        self._longest_s = config.first_chunk_s
        self._max_tokens = config.max_num_batched_tokens
        self._load = StepLoad(0, 0, 0)
        self._left = 0
        self._left_s = 0.0

    def open(self, num_decodes: int, num_kv_tokens: float) -> None:
        """See Budget."""
        self._load = StepLoad(num_decodes, num_kv_tokens, num_decodes)
        self._left = self._max_tokens - num_decodes
        budget_s = max(self._budget_s, min(self._longest_s, self.cost.fixed_s / MAX_FIXED_SHARE))
        self._left_s = max(budget_s - self.cost.predict(self._load), MIN_CHUNK_SHARE * budget_s)

    def take(
        self, start: int, wanted: int, *, is_new_row: bool = True, is_first: bool = False, windows: Windows = ()
    ) -> int:
        """See Budget."""
        affordable = self.cost.num_affordable(start, self._left_s, is_new_row=is_new_row)
        if windows:  # then it costs less than that, but never less with more tokens
            more = range(affordable + 1, wanted + 1)
            affordable += bisect_right(
                more,
                self._left_s,
                key=lambda count: self.cost.chunk_s(start, count, is_new_row=is_new_row, windows=windows),
            )
        granted = min(wanted, self._left, max(affordable, is_first))
        if granted:
            load = self._load
            num_kv_tokens = load.num_kv_tokens + chunk_kv_tokens(start, granted, windows)
            self._load = StepLoad(load.num_tokens + granted, num_kv_tokens, load.num_rows + is_new_row)
            self._left -= granted
            self._left_s -= self.cost.chunk_s(start, granted, is_new_row=is_new_row, windows=windows)
        return granted

    def num_tokens(self) -> int:
        """See Budget."""
        return min(self._left, max(1, self.cost.num_affordable(0, self._left_s, is_new_row=True)))

    def observe(self, seconds: float) -> None:
        """See Budget."""
        if self._load.num_tokens:
            self.cost.observe(self._load, seconds)

    def recompute_s(self, start: int, count: int, windows: Windows = ()) -> float:
        """See Budget."""
        return self.cost.chunk_s(start, count, is_new_row=True, windows=windows)
