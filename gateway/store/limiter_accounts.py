"""What this gateway remembers of each tenant's use, and how the limiter's scripts take and give it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from common.clock import Clock
from common.types import Reason
from gateway.admission.limits import NO_LIMITS, TenantLimits
from gateway.admission.recent import RecentUse
from gateway.admission.shares import NOTHING, Amounts, Share, Use
from gateway.store.connection import Argument, microseconds

_NO_LIMIT = -1
_IDLE_S = 600.0  # a tenant's share is given back after so long without a request
_FORGOTTEN_S = 25 * 3600.0  # the longest day


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a running request has taken, and when: monotonic seconds, and seconds since 1970."""

    tenant: str
    tokens: int
    at: float
    time: float

    @classmethod
    def of(cls, tenant: str, tokens: int, clock: Clock) -> Reservation:
        """Taken now."""
        return cls(tenant, tokens, clock.monotonic(), clock.time())

    def use(self, request_id: str) -> Use:
        """The same, as something that the store has to be told."""
        return Use(request_id, self.at, 1, self.tokens)


@dataclass(slots=True, eq=False)
class Account:
    """One tenant as this gateway knows it."""

    limits: TenantLimits = NO_LIMITS
    share: Share = field(default_factory=Share)
    recent: RecentUse = field(default_factory=RecentUse)
    used_at: float = 0.0
    is_touched: bool = False  # since the share was renewed last

    def touch(self, limits: TenantLimits, now: float) -> None:
        """A request of the tenant has come."""
        self.limits, self.used_at, self.is_touched = limits, now, True

    def is_due(self, now: float, lease_s: float) -> bool:
        """Whether the store should hear of it now."""
        is_ageing = self.share.held != NOTHING and self.share.until - now < 0.75 * lease_s
        return not self.share.is_settled or is_ageing or (self.is_touched and not self.limits.is_unmetered)

    def is_idle(self, now: float) -> bool:
        """Whether its share is of no use here."""
        return now - self.used_at > _IDLE_S and self.share.held != NOTHING and self.share.is_settled

    def is_forgotten(self, now: float) -> bool:
        """Whether nothing of it counts any more."""
        return now - self.used_at > _FORGOTTEN_S and self.share.is_settled

    def leave(self) -> None:
        """Its share is given back."""
        self.share.held = NOTHING


def limit_arguments(limits: TenantLimits) -> list[Argument]:
    """The four limits and the allowance for requests at once, as scripts take them."""
    numbers = (
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.max_concurrent,
        limits.tokens_per_day,
        limits.allowance,
    )
    return [_NO_LIMIT if number is None else number for number in numbers]


def amounts_of(amounts: Amounts) -> list[Argument]:
    """Parts of the four limits, as scripts take them."""
    return [amounts.requests, amounts.tokens, amounts.concurrent, amounts.tokens_today]


def use_arguments(uses: Iterable[Use], now: float) -> Iterator[Argument]:
    """Uses of a share, as the script takes them."""
    for use in uses:
        ago = microseconds(max(now - use.at, 0.0))
        yield from (use.batch or 0, use.request_id, ago, use.requests, use.tokens, use.state.value)


def refusal_of(limit: int, tenant: str, tokens: int, limits: TenantLimits) -> tuple[Reason, str, str]:
    """Reason, subject and description of a refusal by the limit at that position."""
    at_once = "" if limits.allowance is None else f", {limits.allowance} of them at once"
    reason, what = {
        1: (Reason.REQUEST_RATE, f"{limits.requests_per_minute} requests per minute{at_once}"),
        2: (Reason.TOKEN_RATE, f"{limits.tokens_per_minute} tokens per minute"),
        3: (Reason.CONCURRENCY, f"{limits.max_concurrent} requests at a time"),
        4: (Reason.DAILY_BUDGET, f"{limits.tokens_per_day} tokens per day ({limits.time_zone})"),
    }[limit]
    needs = f"; this request needs up to {tokens}" if reason in (Reason.TOKEN_RATE, Reason.DAILY_BUDGET) else ""
    return reason, f"tenant:{tenant}", f"the tenant's limit is {what}{needs}"
