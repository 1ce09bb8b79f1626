"""What a gateway may admit by itself while the store is out of reach: its shares of the tenants' limits.

A share is set aside in the store before it can be used: there, use, all shares and a newcomer's cost together are never
above a limit. So the fleet's total holds whichever gateways lose the store, and when. What was admitted from a share
counts against it until the store has charged it, which the same step does that renews the share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gateway.admission.limits import Remaining, TenantLimits

WINDOW_S = 61.0  # the slots of a second that a window of a minute has in the store
_MOST_TOLD = 2000  # requests in one call


@dataclass(frozen=True, slots=True)
class Amounts:
    """So much of each of a tenant's four limits."""

    requests: int = 0  # of a minute
    tokens: int = 0  # of a minute
    concurrent: int = 0
    tokens_today: int = 0


NOTHING = Amounts()


class UseState(Enum):
    """What has become of a use, and so what the store has to do about it."""

    RUNNING = "running"  # counts with all it may use, and holds a slot
    ENDED = "ended"  # counts with what it has used
    OF_WINDOW = "window"  # a sum of ended requests that only a window has to know again
    OF_DAY = "day"  # the same for a day

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs."""
        return self is not UseState.RUNNING


@dataclass(slots=True, eq=False)
class Use:
    """Something that the store does not count yet, or may not count."""

    request_id: str  # empty for a sum
    at: float  # monotonic seconds
    requests: int
    tokens: int
    state: UseState = UseState.RUNNING
    batch: int | None = None  # number of the call that told the store first
    told: UseState | None = None  # what the latest call told


class Share:
    """One tenant's share at this gateway. Times are monotonic seconds. No clock, no I/O."""

    def __init__(self) -> None:
        self.held = NOTHING
        self.until = float("-inf")  # the store counts on it for longer than this gateway uses it
        self.number = 0  # of the latest call about it: the answers of earlier ones are void
        self._uses: dict[str, Use] = {}
        self._sums: list[Use] = []

    def __repr__(self) -> str:
        return f"Share(held={self.held}, uses={len(self._uses)}, sums={len(self._sums)})"

    @property
    def is_settled(self) -> bool:
        """Whether the store knows all that was used."""
        return not self._uses and not self._sums

    def used(self, now: float) -> Amounts:
        """What was admitted from it and the store has not charged."""
        return _sum(self._uses.values(), now)

    def admit(self, request_id: str, tokens: int, limits: TenantLimits, now: float) -> Remaining | None:
        """Takes a request's whole cost and says what is left of the share; None, and no change, if it is too small."""
        if request_id in self._uses:
            return self._left(self.used(now), limits)
        after = NOTHING
        if not limits.is_unmetered:
            used = self.used(now)
            after = Amounts(used.requests + 1, used.tokens + tokens, used.concurrent + 1, used.tokens_today + tokens)
            if now >= self.until or not self._covers(after, limits):
                return None
        self._uses[request_id] = Use(request_id, now, 1, tokens)
        return self._left(after, limits)

    def _covers(self, used: Amounts, limits: TenantLimits) -> bool:
        return all(
            limit is None or amount <= held
            for limit, amount, held in (
                (limits.requests_per_minute, used.requests, self.held.requests),
                (limits.tokens_per_minute, used.tokens, self.held.tokens),
                (limits.max_concurrent, used.concurrent, self.held.concurrent),
                (limits.tokens_per_day, used.tokens_today, self.held.tokens_today),
            )
        )

    def _left(self, used: Amounts, limits: TenantLimits) -> Remaining:
        def left(limit: int | None, held: int, amount: int) -> int | None:
            return None if limit is None else max(held - amount, 0)

        return Remaining(
            left(limits.requests_per_minute, self.held.requests, used.requests),
            left(limits.tokens_per_minute, self.held.tokens, used.tokens),
            left(limits.max_concurrent, self.held.concurrent, used.concurrent),
            left(limits.tokens_per_day, self.held.tokens_today, used.tokens_today),
        )

    def end(self, request_id: str, tokens: int) -> bool:
        """A request has ended. False if the store counts it, and so has to be told."""
        use = self._uses.get(request_id)
        if use is None:
            return False
        use.tokens, use.state = tokens, UseState.ENDED
        return True

    def forget(self, request_id: str) -> Use | None:
        """The store has taken the request into its account by itself, late: it is no use of the share any more."""
        return self._uses.pop(request_id, None)

    def owe(self, uses: Iterable[Use]) -> None:
        """The store has lost these, all of which it knew."""
        for use in uses:
            if not use.request_id:
                self._sums.append(use)
            elif use.request_id not in self._uses:
                self._uses[use.request_id] = use

    def drop_sums(self) -> None:
        """The store has lost everything once more: other sums take the place of these."""
        self._sums.clear()

    def begin_call(self, now: float) -> tuple[int, Amounts, list[Use]]:
        """Number of the call that renews the share, what is held or used beside what the call tells, and that."""
        self.number += 1
        uses = list(self._uses.values())
        told, untold = [*uses[:_MOST_TOLD], *self._sums], uses[_MOST_TOLD:]
        for use in told:
            use.batch = self.number if use.batch is None else use.batch
            use.told = use.state
        return self.number, _larger(self.held, _sum(untold, now)), told

    def granted(self, number: int, amounts: Amounts, until: float) -> list[Use]:
        """Takes in the answer of a call: what it told is charged, and counts no more against the new share.

        Returns the requests that the store counts from now on. Nothing changes if a later call was made meanwhile.
        """
        if number != self.number:
            return []
        self.held, self.until = amounts, until
        self._sums = [use for use in self._sums if use.batch is None]
        charged = [use for use in self._uses.values() if use.told is use.state and use.batch is not None]
        for use in charged:
            del self._uses[use.request_id]
        return charged

    def give_back(self, now: float) -> tuple[int, Amounts]:
        """Gives up all that is not used, before the store is told so: number of that call, and what it keeps."""
        self.number += 1
        self.held = self.used(now)
        return self.number, self.held


def _sum(uses: Iterable[Use], now: float) -> Amounts:
    all_uses = list(uses)
    recent = [use for use in all_uses if use.at > now - WINDOW_S]
    return Amounts(
        requests=len(recent),
        tokens=sum(use.tokens for use in recent),
        concurrent=sum(not use.state.is_over for use in all_uses),
        tokens_today=sum(use.tokens for use in all_uses),
    )


def _larger(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(
        max(one.requests, other.requests),
        max(one.tokens, other.tokens),
        max(one.concurrent, other.concurrent),
        max(one.tokens_today, other.tokens_today),
    )
