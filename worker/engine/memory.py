"""May a request have its memory now, and how much of it at once?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.cache.manager import CacheManager
from worker.engine.config import SchedulerConfig
from worker.engine.forecast import MemoryForecast, OutputForecast, ThrashMeter, num_expected
from worker.engine.request import Request


class Memory(Protocol):
    """Decides over admissions; gives out nothing itself but through `admit`."""

    thrash: ThrashMeter

    def begin_step(self, running: Sequence[Request]) -> None:
        """Says who runs. The list may change in the step by `admit` and `leave` only."""
        ...

    def leave(self, victim: Request) -> None:
        """A running request is about to be preempted in this step."""
        ...

    def fits(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """Whether a waiting request can enter, with these running ones out of the way. Changes nothing."""
        ...

    def admit(self, request: Request) -> bool:
        """Gives or promises a request that fits its blocks; returns whether it did. It runs from then on."""
        ...

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """Whether a waiting request may enter before an earlier one that does not fit."""
        ...

    def observe_end(self, request: Request) -> None:
        """Learns from a request that ended by itself."""
        ...


class _Planned:
    """What both kinds share: the learned length of outputs."""

    def __init__(self, manager: CacheManager, config: SchedulerConfig) -> None:
        self.thrash = ThrashMeter()
        self._manager = manager
        self._config = config
        self._outputs = OutputForecast(config.optimism, config.output_share)
        self._running: Sequence[Request] = ()
        self._share = 1.0

    def begin_step(self, running: Sequence[Request]) -> None:
        """See Memory."""
        self._running = running
        self._share = self._outputs.share(self.thrash.ratio / self._config.max_thrash)

    def observe_end(self, request: Request) -> None:
        """See Memory."""
        self._outputs.observe(request)


class Reserve(_Planned):
    """All the memory that a request may ever need, at once and in one piece: it never grows and is never preempted.

    Between the pieces gaps are left that are too short for others, as in engines without paging.
    """

    def fits(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """See Memory. Nobody makes way: who would leave may lie anywhere."""
        del victims
        return self._manager.has_run(request, _max_kv_tokens(request))

    def admit(self, request: Request) -> bool:
        """See Memory."""
        return self._manager.admit_run(request, _max_kv_tokens(request))

    def leave(self, victim: Request) -> None:
        """See Memory."""

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """See Memory. Never: first come, first served."""
        del request, blocked
        return False


class LookAhead(_Planned):
    """A promise of the memory of the known tokens, if the peak that is to be expected fits as well."""

    def __init__(self, manager: CacheManager, config: SchedulerConfig) -> None:
        super().__init__(manager, config)
        self._forecast: MemoryForecast | None = None  # of the running requests; made when it is first needed
        self._capacity = 0  # tokens in the blocks that requests have for themselves; made with the forecast
        self._steps_until_fit: int | None = None  # of the request that blocks the others in this step

    def begin_step(self, running: Sequence[Request]) -> None:
        """See Memory."""
        super().begin_step(running)
        self._forecast = None
        self._steps_until_fit = None

    def fits(self, request: Request, victims: Sequence[Request] = ()) -> bool:
        """See Memory. A request that would be alone always fits: waiting could last for ever."""
        others = len(self._running) - len(victims)
        if not self._has_blocks(request, request.num_tokens, self._headroom(request, others), victims):
            return False
        if not others:
            return True
        forecast = self._forecast_of_all()
        without = [self._load(victim) for victim in victims]
        unshared = self._bounded(request, self._manager.blocks_for(request, request.num_tokens))
        if forecast.surely_fits(*unshared, self._capacity, without):  # even without a hit
            return True
        # What it would hold that nobody holds now:
        load = self._bounded(request, self._manager.num_needed(request, request.num_tokens))
        return forecast.fits(*load, self._capacity, without)

    def admit(self, request: Request) -> bool:
        """See Memory."""
        forecast = self._forecast_of_all()
        if not self._manager.admit(request, headroom=self._headroom(request, len(self._running))):
            return False
        forecast.add(*self._load(request))
        return True

    def leave(self, victim: Request) -> None:
        """See Memory."""
        self._forecast_of_all().remove(*self._load(victim))
        self._steps_until_fit = None

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """See Memory. A bounded number of times, if it should be gone before the other finds enough blocks.

        That is a reservation as in EASY backfilling (Lifka, The ANL/IBM SP scheduling system, 1995).
        """
        if blocked.num_overtaken >= self._config.max_overtakes:
            return False
        if self._steps_until_fit is None:
            self._steps_until_fit = self._count_steps_until_fit(blocked)
        return num_expected(request, self._share) <= self._steps_until_fit

    def _count_steps_until_fit(self, request: Request) -> int:
        """In how many steps enough of the running requests should have ended, as if nobody grew or entered."""
        free = self._manager.num_available
        needed = self._manager.num_needed(request, request.num_tokens)
        ends = sorted((num_expected(other, self._share), self._manager.num_freed(other)) for other in self._running)
        for steps, freed in ends:
            free += freed
            if free >= needed:
                return steps
        return ends[-1][0] if ends else 0

    def _forecast_of_all(self) -> MemoryForecast:
        if self._forecast is None:
            own = [_num_own_blocks(request) for request in self._running]
            self._forecast = MemoryForecast(map(self._bounded, self._running, own))
            # Blocks that nobody took for itself, or whoever did has ended, stay for as long as anybody is there.
            manager = self._manager
            num_shared = manager.counts.referenced - (sum(own) - manager.num_promised)
            num_own_blocks = manager.pool.num_usable - max(0, num_shared)
            self._capacity = num_own_blocks * manager.block_size // manager.num_tables
        return self._forecast

    def _load(self, request: Request) -> tuple[int, int]:
        """Remaining tokens, and the tokens in the blocks that it took for itself or was promised."""
        return self._bounded(request, _num_own_blocks(request))

    def _bounded(self, request: Request, num_held: int) -> tuple[int, int]:
        """Remaining tokens, and the tokens in so many blocks; of a request which a window keeps from growing on: none,
        and all it will hold. A token takes room in every block table."""
        manager, remaining = self._manager, num_expected(request, self._share)
        held = num_held * manager.block_size // manager.num_tables
        if not request.windows:
            return remaining, held
        most = manager.blocks_for(request, request.num_tokens + remaining) * manager.block_size // manager.num_tables
        return (remaining, held) if remaining + held <= most else (0, most)

    def _has_blocks(self, request: Request, num_tokens: int, headroom: int, victims: Sequence[Request]) -> bool:
        free = self._manager.num_available
        if victims:
            free += sum(self._manager.num_freed(victim) for victim in victims)
        if self._manager.blocks_for(request, num_tokens) + headroom <= free:  # even without a hit
            return True
        return self._manager.num_needed(request, num_tokens) + headroom <= free

    def _headroom(self, request: Request, num_others: int) -> int:
        """Blocks that stay free after an admission. A lone request needs none: waiting for more could last for ever."""
        if not num_others:
            return 0
        if request.num_preemptions:  # it shall not be preempted again before everybody has filled a block
            return self._config.watermark_blocks + num_others * self._manager.num_tables
        return self._config.watermark_blocks


def _num_own_blocks(request: Request) -> int:
    return len(request.block_ids) - request.num_holes - request.num_shared_blocks + request.num_promised


def _max_kv_tokens(request: Request) -> int:
    """Tokens whose KV a request may ever hold: the last one's is never needed, unless it is known already."""
    return max(request.num_tokens, request.max_total_tokens - 1)
