"""What this gateway remembers of each tenant's use, and how the limiter's scripts take and give it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

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


@dataclass(frozen=True, slots=True)
class ShareCall:
    """A call that renews the shares of these tenants: its number for each, and what the script takes of them."""

    tenants: Sequence[str]
    numbers: Sequence[int]
    arguments: Sequence[Argument]
    sent_at: float  # monotonic seconds


class Accounts:
    """All tenants that have been here lately, and their running requests that the store counts. No I/O."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_tenant: dict[str, Account] = {}
        self.running: dict[str, Reservation] = {}  # by request id, counted by the store and not settled

    @property
    def tenants(self) -> list[str]:
        """Ids of the tenants."""
        return list(self._by_tenant)

    def find(self, tenant: str) -> Account | None:
        """The account of a tenant that has been here."""
        return self._by_tenant.get(tenant)

    def of(self, tenant: str, limits: TenantLimits) -> Account:
        """The account of a tenant that has just sent a request."""
        account = self._by_tenant.setdefault(tenant, Account())
        account.touch(limits, self._clock.monotonic())
        return account

    def day_offset(self, limits: TenantLimits) -> int:
        """Microseconds that the tenant's day is ahead of UTC."""
        offset = limits.day_offset(datetime.fromtimestamp(self._clock.time(), UTC))
        return microseconds(offset.total_seconds())

    def reservation(self, tenant: str, tokens: int) -> Reservation:
        """Something taken now."""
        return Reservation(tenant, tokens, self._clock.monotonic(), self._clock.time())

    def reservation_of(self, tenant: str, use: Use) -> Reservation:
        """A use of a share, which the store counts now."""
        return Reservation(tenant, use.tokens, use.at, use.at + self._clock.time() - self._clock.monotonic())

    def count(self, request_id: str, reservation: Reservation) -> None:
        """The store counts this running request."""
        account = self._by_tenant.get(reservation.tenant)
        if request_id not in self.running and account is not None:
            self.running[request_id] = reservation
            account.recent.add(reservation.at, reservation.time, 1, reservation.tokens)

    def settle(self, request_id: str, tokens: int) -> None:
        """It has ended, with so many tokens."""
        reservation = self.running.pop(request_id, None)
        account = self._by_tenant.get(reservation.tenant) if reservation is not None else None
        if reservation is not None and account is not None:
            account.recent.add(reservation.at, reservation.time, 0, tokens - reservation.tokens)

    def owe(self, request_ids: Iterable[str]) -> None:
        """The store has lost these, if they still run."""
        for request_id in request_ids:
            reservation = self.running.pop(request_id, None)
            account = self._by_tenant.get(reservation.tenant) if reservation is not None else None
            if reservation is not None and account is not None:
                account.recent.add(reservation.at, reservation.time, -1, -reservation.tokens)
                account.share.owe([reservation.use(request_id)])

    def owe_everything(self) -> None:
        """The store has lost all that it knew."""
        now, time = self._clock.monotonic(), self._clock.time()
        self.owe(list(self.running))
        for account in self._by_tenant.values():
            account.share.drop_sums()
            account.share.owe(account.recent.sums(now, time))
            account.is_touched = True

    def due(self, recalled: set[str], lease_s: float) -> list[str]:
        """Tenants of which the store should hear now."""
        now = self._clock.monotonic()
        return [
            tenant for tenant, account in self._by_tenant.items() if tenant in recalled or account.is_due(now, lease_s)
        ]

    def begin_call(self, tenants: Sequence[str]) -> ShareCall:
        """What there is to tell of them."""
        now = self._clock.monotonic()
        numbers: list[int] = []
        arguments: list[Argument] = []
        for tenant in tenants:
            account = self._by_tenant[tenant]
            account.is_touched = False
            number, kept, uses = account.share.begin_call(now)
            numbers.append(number)
            arguments += [tenant, number, *limit_arguments(account.limits), self.day_offset(account.limits)]
            arguments += [*amounts_of(kept), len(uses), *_use_arguments(uses, now)]
        return ShareCall(tenants, numbers, arguments, now)

    def end_call(self, call: ShareCall, answers: Sequence[Sequence[int]], lease_s: float) -> None:
        """Takes in the new shares; what the call told is charged."""
        for tenant, number, amounts in zip(call.tenants, call.numbers, answers, strict=True):
            account = self._by_tenant[tenant]
            until = call.sent_at + lease_s
            for use in account.share.granted(number, Amounts(*amounts), until) if amounts else ():
                reservation = self.reservation_of(tenant, use)
                if use.state.is_over:
                    account.recent.add(reservation.at, reservation.time, use.requests, use.tokens)
                else:
                    self.count(use.request_id, reservation)

    def leave_idle(self) -> list[str]:
        """Forgets what is old; tenants whose shares are to be given back."""
        now, time = self._clock.monotonic(), self._clock.time()
        idle = [tenant for tenant, account in self._by_tenant.items() if account.is_idle(now)]
        for tenant in idle:
            self._by_tenant[tenant].leave()
        for tenant, account in list(self._by_tenant.items()):
            account.recent.forget_old(now, time)
            if account.is_forgotten(now):
                del self._by_tenant[tenant]
        return idle


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


def _use_arguments(uses: Iterable[Use], now: float) -> Iterator[Argument]:
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
