"""The tenants' limits in Redis: every method runs one script, which alone decides and commits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.errors import LimitExceededError, UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost, OverLimitError
from gateway.admission.limits import Remaining, TenantLimits
from gateway.admission.shares import NOTHING, Amounts
from gateway.store.connection import Argument, Link, Trunk, microseconds, read_script, text
from gateway.store.keys import PoolKeys
from gateway.store.limiter_accounts import Account, Accounts, Reservation, amounts_of, limit_arguments, refusal_of

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
        self._scripts = {name: self._link.script(name, _PRELUDES, read_script) for name in names}
        self._accounts = Accounts(clock)
        self._unsettled: dict[str, tuple[str, int]] = {}  # request id -> tenant, tokens used: the store did not answer
        self._generation = ""  # of the store's content, as the last renewal found it

    def __repr__(self) -> str:
        return f"RedisLimiter(pool={self._keys.pool}, running={len(self._accounts.running)})"

    def reserve(
        self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits, *, patience_s: float = 60.0
    ) -> Coroutine[Any, Any, Remaining]:
        """Takes the whole cost, or raises LimitExceededError and writes nothing. See `Limiter.reserve`."""
        former = self._unsettled.pop(request_id, None) if patience_s > 0 else None
        if former is not None:  # of an earlier request of this id, which has ended
            self._send_settle(former[0], request_id, former[1])
        reply = None if patience_s <= 0 else self._take(tenant, request_id, cost.num_tokens, limits)
        return self._reserved(reply, tenant, request_id, cost, limits, patience_s)

    async def _reserved(
        self,
        reply: asyncio.Future[list[int]] | None,
        tenant: str,
        request_id: str,
        cost: Cost,
        limits: TenantLimits,
        patience_s: float,
    ) -> Remaining:
        account, tokens = self._accounts.of(tenant, limits), cost.num_tokens
        if reply is None:
            return self._admit(account, tenant, request_id, cost, limits)
        try:
            is_answered = await self._link.is_answered(reply, patience_s)
            if is_answered and reply.result()[0] > _BY_SHARES and account.share.held != NOTHING:
                # Only shares are in the way, and one of them is of no use here while the store answers.
                kept = account.share.give_back(self._clock.monotonic())
                reply = self._take(tenant, request_id, tokens, limits, kept)
                is_answered = await self._link.is_answered(reply, patience_s)
            if is_answered:
                remaining = self._decision(reply.result(), tenant, tokens, limits)
                self._counted(request_id, self._accounts.reservation(tenant, tokens))
                return remaining
        except asyncio.CancelledError:
            self._link.start(self._withdraw(reply, tenant, request_id))
            raise
        except UnavailableError:  # answered, and not by the store
            pass
        try:
            remaining = self._admit(account, tenant, request_id, cost, limits)
        except UnavailableError:
            self._link.start(self._withdraw(reply, tenant, request_id))
            raise
        self._link.start(self._confirm(reply, account, tenant, request_id))
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

    def _decision(self, reply: list[int], tenant: str, tokens: int, limits: TenantLimits) -> Remaining:
        """What is left after a reservation. Raises LimitExceededError for a refusal."""
        refusal, wait, *left = reply
        if refusal == _UNSETTLED:
            raise self._unavailable("the store has just come back, and does not know yet what is used")
        remaining = _remaining(left)
        if refusal:
            raise self._refusal(refusal % _BY_SHARES, tenant, tokens, limits, wait, remaining)
        return remaining

    def _counted(self, request_id: str, reservation: Reservation) -> None:
        """The store counts this running request."""
        self._unsettled.pop(request_id, None)
        self._accounts.count(request_id, reservation)

    def _take(
        self, tenant: str, request_id: str, tokens: int, limits: TenantLimits, kept: tuple[int, Amounts] | None = None
    ) -> asyncio.Future[list[int]]:
        arguments: list[Argument] = [
            tenant,
            request_id,
            tokens,
            *limit_arguments(limits),
            self._accounts.day_offset(limits),
            microseconds(self._settings.lease_s),
            self._gateway_id,
            self._generation,
        ]
        if kept is not None:
            arguments += [kept[0], *amounts_of(kept[1])]
        return self._send("reserve", *arguments)

    def _refusal(
        self, limit: int, tenant: str, tokens: int, limits: TenantLimits, wait: int, remaining: Remaining
    ) -> LimitExceededError:
        # Never too early, and not at the same moment for everybody who was refused.
        retry_after_s = None if wait == _NEVER else wait / 1e6 * self._uniform(1.0, 1.4)
        return OverLimitError.of(refusal_of(limit, tenant, tokens, limits), retry_after_s, remaining)

    async def _withdraw(self, reply: asyncio.Future[list[int]], tenant: str, request_id: str) -> None:
        """Undoes a reservation that nobody waits for any more."""
        await asyncio.wait([reply])
        error = reply.exception()
        if error is None and reply.result()[0] == 0:
            await self._send_settle(tenant, request_id, 0)
        elif isinstance(error, UnavailableError):
            self._unsettled[request_id] = tenant, 0

    async def _confirm(self, reply: asyncio.Future[list[int]], account: Account, tenant: str, request_id: str) -> None:
        """The share pays for a request, unless its reservation was only late."""
        await asyncio.wait([reply])
        if reply.exception() is not None or reply.result()[0] != 0:
            return
        use = account.share.forget(request_id)
        if use is not None:
            self._counted(request_id, self._accounts.reservation_of(tenant, use))
            if use.state.is_over:
                await self._send_settle(tenant, request_id, use.tokens)
        elif request_id not in self._accounts.running:  # it has been charged, and has ended
            await self._send_settle(tenant, request_id, 0)

    def is_confirmed(self, request_id: str) -> bool:
        """Whether the store counts a running request already. See `Limiter.is_confirmed`."""
        return request_id in self._accounts.running

    async def remaining(self, tenants: Mapping[str, TenantLimits]) -> list[Remaining]:
        """What is left of the limits of each now. See `Limiter.remaining`."""
        arguments: list[Argument] = []
        for tenant, limits in tenants.items():
            arguments += [tenant, *limit_arguments(limits)[:4], self._accounts.day_offset(limits)]
        left = await self._run("budgets", *arguments)
        return [_remaining(left[start : start + 4]) for start in range(0, len(left), 4)]

    def held(self, tenant: str) -> Amounts:
        """What this gateway may admit for a tenant without the store, besides what it has."""
        account = self._accounts.find(tenant)
        return NOTHING if account is None else account.share.held

    def settle(
        self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int
    ) -> asyncio.Future[Any]:
        """Replaces the reservation by what was used. See `Limiter.settle`."""
        tokens = num_prompt_tokens + num_output_tokens
        account = self._accounts.find(tenant)
        is_use = account is not None and account.share.end(request_id, tokens)
        if not is_use:
            return self._send_settle(tenant, request_id, tokens)
        nothing_to_send = asyncio.get_running_loop().create_future()
        nothing_to_send.set_result(None)
        return nothing_to_send

    def _send_settle(self, tenant: str, request_id: str, tokens: int) -> asyncio.Future[Any]:
        self._accounts.settle(request_id, tokens)

        def note(reply: asyncio.Future[Any]) -> None:
            if not reply.cancelled() and isinstance(reply.exception(), UnavailableError):
                self._unsettled[request_id] = tenant, tokens

        reply = self._send("settle", tenant, request_id, tokens)
        reply.add_done_callback(note)  # be there still a caller or not
        return reply

    async def renew(self) -> None:
        """Says that the requests reserved here still run, and tells the store what it has lost or did not answer;
        renews this gateway's shares of the limits."""
        await self._shielded(self._renew())

    async def _renew(self) -> None:
        arguments: list[Argument] = [microseconds(self._settings.lease_s), self._generation, secrets.token_hex(8)]
        for request_id, reservation in self._accounts.running.items():
            arguments += [reservation.tenant, request_id]
        generation, unknown, recalled = await self._run("renew", *arguments)
        if self._generation and text(generation) != self._generation:
            self._accounts.owe_everything()
        else:
            self._accounts.owe([text(request_id) for request_id in unknown])
        self._generation = text(generation)
        await self._settle_left()
        await self._share({text(tenant) for tenant in recalled})

    async def _settle_left(self) -> None:
        """Before shares are charged: that gives ids of requests that have ended to new ones."""
        for request_id in list(self._unsettled):
            if request_id in self._unsettled:  # and was not reserved anew since the last of these was sent
                tenant, tokens = self._unsettled.pop(request_id)
                await self._send_settle(tenant, request_id, tokens)

    async def _share(self, recalled: set[str]) -> None:
        """Charges uses of the shares, and renews those of tenants that are active or have something to tell."""
        bounds, accounts = self._settings, self._accounts
        due = accounts.due(recalled, bounds.outage_s)
        for start in range(0, len(due), _TENANTS_PER_CALL):
            call = accounts.begin_call(due[start : start + _TENANTS_PER_CALL])
            answers = await self._run(
                "share",
                self._gateway_id,
                microseconds(bounds.outage_s),
                round(bounds.outage_share * 1000),
                microseconds(bounds.lease_s),
                *call.arguments,
            )
            accounts.end_call(call, answers, bounds.outage_s)
        idle = accounts.leave_idle()
        if idle:
            await self._run("leave_shares", self._gateway_id, *idle)

    async def close(self) -> None:
        """Tells what is left to tell, gives the shares back, closes connections. What is reserved stays so until its
        leases expire."""
        await self._link.finish_steps()
        try:
            if self._accounts.tenants and self._generation:
                await self._share(set())
                await self._run("leave_shares", self._gateway_id, *self._accounts.tenants)
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
