"""The tenants' limits in Redis: every method runs one script, which alone decides and commits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from common.clock import Clock
from common.errors import LimitExceededError, UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost, OverLimitError
from gateway.admission.limits import Remaining, TenantLimits
from gateway.admission.shares import NOTHING, Amounts, Use
from gateway.store.connection import Argument, Link, Script, Trunk, microseconds, read_script, text
from gateway.store.keys import PoolKeys
from gateway.store.limiter_accounts import Account, Reservation, amounts_of, limit_arguments, refusal_of, use_arguments

_PRELUDES = ("clock", "common", "limits")
_NO_LIMIT = -1
_NEVER = -1
_UNSETTLED = -1
_BY_SHARES = 10  # is added to the limit that refused if only shares were in the way
_TENANTS_PER_CALL = 50


@dataclass(frozen=True, slots=True)
class LimiterSettings:
    """Bounds of the limiter; all gateways of a pool should use the same."""

    lease_s: float = 10.0  # concurrency slots of a gateway that is gone come back after this long
    outage_share: float = 0.1  # of what is unused of each limit, set aside for all gateways together
    outage_s: float = 300.0  # how long a gateway may admit from its shares without the store
    timeout_s: float = 5.0  # for connecting, and for each reply


class RedisLimiter:
    """The `Limiter` of one gateway on a Redis server. Made without I/O; belongs to one event loop.

    A cancelled call still runs to its end, so no reply can reach another caller; a cancelled reservation is undone.
    """

    def __init__(
        self,
        store: str | Trunk,
        *,
        pool: str,
        gateway_id: str,
        clock: Clock,
        uniform: Callable[[float, float], float],
        settings: LimiterSettings | None = None,
        on_share_used: Callable[[], None] = lambda: None,
        read_script: Callable[[str], str] = read_script,
    ) -> None:
        """`clock` tells which time zone's offset is in force, and how old uses of shares are; `uniform(low, high)` is
        the source of jitter; `on_share_used` hears of each request that was admitted without the store; `read_script`
        gives the text of a script by its name."""
        bounds = self._settings = settings or LimiterSettings()
        self._gateway_id = gateway_id
        self._keys = PoolKeys(pool)
        self._pool_keys = self._keys.pool_keys()
        self._clock = clock
        self._uniform = uniform
        self._on_share_used = on_share_used
        self._link = Link(store, timeout_s=bounds.timeout_s)
        names = ("reserve", "settle", "renew", "share", "leave_shares", "budgets")
        self._scripts = {name: Script(name, _PRELUDES, read_script) for name in names}
        self._accounts: dict[str, Account] = {}
        self._running: dict[str, Reservation] = {}  # by request id, counted by the store and not settled
        self._unsettled: dict[str, tuple[str, int]] = {}  # request id -> tenant, tokens used: the store did not answer
        self._generation = ""  # of the store's content, as the last renewal found it

    def __repr__(self) -> str:
        return f"RedisLimiter(pool={self._keys.pool}, running={len(self._running)})"

    async def reserve(
        self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits, *, patience_s: float = 60.0
    ) -> Remaining:
        """Takes the whole cost, or raises LimitExceededError and writes nothing. See `Limiter.reserve`."""
        account = self._account(tenant, limits)
        if patience_s <= 0:
            return self._admit(account, tenant, request_id, cost, limits)
        task = self._link.start(self._reserve(account, tenant, request_id, cost, limits))
        try:
            if await self._link.is_answered(task, patience_s):
                remaining = task.result()
                self._count(account, Reservation.of(tenant, cost.num_tokens, self._clock), request_id)
                return remaining
        except asyncio.CancelledError:
            self._link.start(self._withdraw(task, tenant, request_id))
            raise
        except UnavailableError:  # answered, and not by the store
            pass
        try:
            remaining = self._admit(account, tenant, request_id, cost, limits)
        except UnavailableError:
            self._link.start(self._withdraw(task, tenant, request_id))
            raise
        self._link.start(self._confirm(task, account, tenant, request_id))
        return remaining

    def _admit(self, account: Account, tenant: str, request_id: str, cost: Cost, limits: TenantLimits) -> Remaining:
        """Takes the cost from this gateway's share of the limits."""
        remaining = account.share.admit(request_id, cost.num_tokens, limits, self._clock.monotonic())
        if remaining is None:
            message = "the store of the limits is out of reach, and this gateway may not admit so much without it"
            raise self._unavailable(message)
        self._on_share_used()
        return remaining

    def _unavailable(self, message: str) -> UnavailableError:
        retry_after_s = self._uniform(1.0, 2.0)
        return UnavailableError(message, reason=Reason.STORE_UNAVAILABLE, retry_after_s=retry_after_s)

    async def _reserve(
        self, account: Account, tenant: str, request_id: str, cost: Cost, limits: TenantLimits
    ) -> Remaining:
        tokens = cost.num_tokens
        refusal, wait, *left = await self._take(tenant, request_id, tokens, limits)
        if refusal > _BY_SHARES and account.share.held != NOTHING:
            kept = account.share.give_back(self._clock.monotonic())
            refusal, wait, *left = await self._take(tenant, request_id, tokens, limits, kept)
        if refusal == _UNSETTLED:
            raise self._unavailable("the store has just come back, and does not know yet what is used")
        remaining = _remaining(left)
        if refusal:
            raise self._refusal(refusal % _BY_SHARES, tenant, tokens, limits, wait, remaining)
        return remaining

    def _count(self, account: Account, reservation: Reservation, request_id: str) -> None:
        """The store counts this running request."""
        if request_id not in self._running:
            self._unsettled.pop(request_id, None)
            self._running[request_id] = reservation
            account.recent.add(reservation.at, reservation.time, 1, reservation.tokens)

    async def _take(
        self, tenant: str, request_id: str, tokens: int, limits: TenantLimits, kept: tuple[int, Amounts] | None = None
    ) -> list[int]:
        arguments: list[Argument] = [
            tenant,
            request_id,
            tokens,
            *limit_arguments(limits),
            self._day_offset(limits),
            microseconds(self._settings.lease_s),
            self._gateway_id,
            self._generation,
        ]
        if kept is not None:
            arguments += [kept[0], *amounts_of(kept[1])]
        reply: list[int] = await self._run("reserve", *arguments)
        return reply

    def _day_offset(self, limits: TenantLimits) -> int:
        offset = limits.day_offset(datetime.fromtimestamp(self._clock.time(), UTC))
        return microseconds(offset.total_seconds())

    def _refusal(
        self, limit: int, tenant: str, tokens: int, limits: TenantLimits, wait: int, remaining: Remaining
    ) -> LimitExceededError:
        # Never too early, and not at the same moment for everybody who was refused.
        retry_after_s = None if wait == _NEVER else wait / 1e6 * self._uniform(1.0, 1.4)
        return OverLimitError.of(refusal_of(limit, tenant, tokens, limits), retry_after_s, remaining)

    async def _withdraw(self, reserving: asyncio.Task[Remaining], tenant: str, request_id: str) -> None:
        """Undoes a reservation that nobody waits for any more."""
        await asyncio.wait([reserving])
        error = reserving.exception()
        if error is None:
            await self._settle(tenant, request_id, 0)
        elif isinstance(error, UnavailableError):
            self._unsettled[request_id] = tenant, 0

    async def _confirm(
        self, reserving: asyncio.Task[Remaining], account: Account, tenant: str, request_id: str
    ) -> None:
        """The share pays for a request, unless its reservation was only late."""
        await asyncio.wait([reserving])
        if reserving.exception() is not None:
            return
        use = account.share.forget(request_id)
        if use is not None:
            self._count(account, self._reservation(tenant, use), request_id)
            if use.state.is_over:
                await self._settle(tenant, request_id, use.tokens)
        elif request_id not in self._running:  # it has been charged, and has ended
            await self._settle(tenant, request_id, 0)

    def is_confirmed(self, request_id: str) -> bool:
        """Whether the store counts a running request already. See `Limiter.is_confirmed`."""
        return request_id in self._running

    async def remaining(self, tenants: Mapping[str, TenantLimits]) -> list[Remaining]:
        """What is left of the limits of each now. See `Limiter.remaining`."""
        arguments: list[Argument] = []
        for tenant, limits in tenants.items():
            arguments += [tenant, *limit_arguments(limits)[:4], self._day_offset(limits)]
        left = await self._run("budgets", *arguments)
        return [_remaining(left[start : start + 4]) for start in range(0, len(left), 4)]

    def held(self, tenant: str) -> Amounts:
        """What this gateway may admit for a tenant without the store, besides what it has."""
        account = self._accounts.get(tenant)
        return NOTHING if account is None else account.share.held

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Replaces the reservation by what was used. See `Limiter.settle`."""
        tokens = num_prompt_tokens + num_output_tokens
        account = self._accounts.get(tenant)
        if account is None or not account.share.end(request_id, tokens):
            await self._settle(tenant, request_id, tokens)

    async def _settle(self, tenant: str, request_id: str, tokens: int) -> None:
        reservation = self._running.pop(request_id, None)
        account = self._accounts.get(tenant)
        if reservation is not None and account is not None:
            account.recent.add(reservation.at, reservation.time, 0, tokens - reservation.tokens)

        def note(reply: asyncio.Future[Any]) -> None:
            if not reply.cancelled() and isinstance(reply.exception(), UnavailableError):
                self._unsettled[request_id] = tenant, tokens

        reply = self._send("settle", tenant, request_id, tokens)
        reply.add_done_callback(note)  # be there still a caller or not
        await asyncio.shield(reply)

    async def renew(self) -> None:
        """Says that the requests reserved here still run, and tells the store what it has lost or did not answer;
        renews this gateway's shares of the limits."""
        await self._shielded(self._renew())

    async def _renew(self) -> None:
        arguments: list[Argument] = [microseconds(self._settings.lease_s), self._generation, secrets.token_hex(8)]
        for request_id, reservation in self._running.items():
            arguments += [reservation.tenant, request_id]
        generation, unknown, recalled = await self._run("renew", *arguments)
        if self._generation and text(generation) != self._generation:
            self._owe_everything()
        else:
            self._owe([text(request_id) for request_id in unknown])
        self._generation = text(generation)
        await self._share({text(tenant) for tenant in recalled})
        for request_id, (tenant, tokens) in list(self._unsettled.items()):
            await self._run("settle", tenant, request_id, tokens)
            self._unsettled.pop(request_id, None)

    def _owe(self, request_ids: list[str]) -> None:
        """The store has lost these, if they still run."""
        for request_id in request_ids:
            reservation = self._running.pop(request_id, None)
            account = self._accounts.get(reservation.tenant) if reservation is not None else None
            if reservation is not None and account is not None:
                account.recent.add(reservation.at, reservation.time, -1, -reservation.tokens)
                account.share.owe([reservation.use(request_id)])

    def _owe_everything(self) -> None:
        now, time = self._clock.monotonic(), self._clock.time()
        self._owe(list(self._running))
        for account in self._accounts.values():
            account.share.drop_sums()
            account.share.owe(account.recent.sums(now, time))
            account.is_touched = True

    async def _share(self, recalled: set[str]) -> None:
        """Charges uses of the shares, and renews those of tenants that are active or have something to tell."""
        now = self._clock.monotonic()
        due = [
            tenant
            for tenant, account in self._accounts.items()
            if tenant in recalled or account.is_due(now, self._settings.outage_s)
        ]
        for start in range(0, len(due), _TENANTS_PER_CALL):
            await self._share_some(due[start : start + _TENANTS_PER_CALL])
        idle = [tenant for tenant, account in self._accounts.items() if account.is_idle(now)]
        if idle:
            for tenant in idle:
                self._accounts[tenant].leave()
            await self._run("leave_shares", self._gateway_id, *idle)
        for tenant, account in list(self._accounts.items()):
            account.recent.forget_old(now, self._clock.time())
            if account.is_forgotten(now):
                del self._accounts[tenant]

    async def _share_some(self, tenants: list[str]) -> None:
        bounds, now = self._settings, self._clock.monotonic()
        arguments: list[Argument] = [
            self._gateway_id,
            microseconds(bounds.outage_s),
            round(bounds.outage_share * 1000),
            microseconds(bounds.lease_s),
        ]
        numbers: list[int] = []
        for tenant in tenants:
            account = self._accounts[tenant]
            account.is_touched = False
            number, kept, uses = account.share.begin_call(now)
            numbers.append(number)
            arguments += [
                tenant,
                number,
                *limit_arguments(account.limits),
                self._day_offset(account.limits),
                *amounts_of(kept),
            ]
            arguments += [len(uses), *use_arguments(uses, now)]
        answers = await self._run("share", *arguments)
        for tenant, number, granted in zip(tenants, numbers, answers, strict=True):
            if granted:
                self._granted(tenant, number, Amounts(*granted), now + bounds.outage_s)

    def _granted(self, tenant: str, number: int, amounts: Amounts, until: float) -> None:
        account = self._accounts[tenant]
        for use in account.share.granted(number, amounts, until):
            reservation = self._reservation(tenant, use)
            if use.state.is_over:
                account.recent.add(reservation.at, reservation.time, use.requests, use.tokens)
            else:
                self._count(account, reservation, use.request_id)

    def _reservation(self, tenant: str, use: Use) -> Reservation:
        return Reservation(tenant, use.tokens, use.at, use.at + self._clock.time() - self._clock.monotonic())

    def _account(self, tenant: str, limits: TenantLimits) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        account.touch(limits, self._clock.monotonic())
        return account

    async def close(self) -> None:
        """Tells what is left to tell, gives the shares back, closes connections. What is reserved stays so until its
        leases expire."""
        await self._link.finish_steps()
        try:
            if self._accounts and self._generation:
                await self._share(set())
                await self._run("leave_shares", self._gateway_id, *self._accounts)
        except UnavailableError:  # they expire
            pass
        finally:
            await self._link.close()

    async def _shielded(self, call: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(self._link.start(call))

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._send(name, *arguments)

    def _send(self, name: str, *arguments: Argument) -> asyncio.Future[Any]:
        return self._link.send(self._scripts[name], self._pool_keys, (self._keys.prefix, *arguments))


def _remaining(numbers: Sequence[int]) -> Remaining:
    return Remaining(*(None if number == _NO_LIMIT else number for number in numbers))
