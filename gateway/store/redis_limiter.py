"""The tenants' limits in Redis: every method runs one script, which alone decides and commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from common.clock import Clock
from common.errors import LimitExceededError, QuotaViolation, UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost
from gateway.admission.limits import Remaining, TenantLimits
from gateway.store.connection import Argument, Link, Script, microseconds, read_script, text
from gateway.store.keys import PoolKeys

_PRELUDES = ("clock", "common", "limits")
_NO_LIMIT = -1
_NEVER = -1


@dataclass(frozen=True, slots=True)
class LimiterSettings:
    """Bounds of the limiter; all gateways of a pool should use the same."""

    lease_s: float = 10.0  # concurrency slots of a gateway that is gone come back after this long
    timeout_s: float = 5.0  # for connecting, and for each reply


@dataclass(frozen=True, slots=True)
class _Reservation:
    """What a running request has taken."""

    tenant: str
    tokens: int
    time_zone: str


class RedisLimiter:
    """The `Limiter` of one gateway on a Redis server. Made without I/O; belongs to one event loop.

    A cancelled call still runs to its end, so no reply can reach another caller; a cancelled reservation is undone.
    """

    def __init__(
        self,
        url: str,
        *,
        pool: str,
        clock: Clock,
        uniform: Callable[[float, float], float],
        settings: LimiterSettings | None = None,
        read_script: Callable[[str], str] = read_script,
    ) -> None:
        """`clock` tells which time zone's offset is in force, nothing else; `uniform(low, high)` is the source of
        jitter; `read_script` gives the text of a script by its name."""
        bounds = self._settings = settings or LimiterSettings()
        self._keys = PoolKeys(pool)
        self._pool_keys = self._keys.pool_keys()
        self._clock = clock
        self._uniform = uniform
        self._link = Link(url, timeout_s=bounds.timeout_s)
        self._scripts = {name: Script(name, _PRELUDES, read_script) for name in ("reserve", "settle", "renew")}
        self._running: dict[str, _Reservation] = {}  # by request id, reserved here and not settled
        self._unsettled: dict[str, tuple[str, int]] = {}  # request id -> tenant, tokens used: the store did not answer

    def __repr__(self) -> str:
        return f"RedisLimiter(pool={self._keys.pool}, running={len(self._running)})"

    async def reserve(self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits) -> Remaining:
        """Takes the whole cost, or raises LimitExceededError and writes nothing. See `Limiter.reserve`."""
        task = self._link.start(self._reserve(tenant, request_id, cost, limits))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._link.start(self._withdraw(task, tenant, request_id))
            raise

    async def _reserve(self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits) -> Remaining:
        tokens = cost.num_prompt_tokens + cost.max_output_tokens
        try:
            refusal, wait, *left = await self._take(request_id, tenant, tokens, limits)
        except UnavailableError:
            self._unsettled[request_id] = tenant, 0
            raise
        if refusal:
            wait_s = None if wait == _NEVER else wait / 1e6
            raise self._refusal(refusal, tenant, tokens, limits, wait_s)
        self._unsettled.pop(request_id, None)
        self._running[request_id] = _Reservation(tenant, tokens, limits.time_zone)
        return Remaining(*(None if number == _NO_LIMIT else number for number in left))

    async def _take(self, request_id: str, tenant: str, tokens: int, limits: TenantLimits) -> list[int]:
        day_offset = limits.day_offset(datetime.fromtimestamp(self._clock.time(), UTC))
        reply: list[int] = await self._run(
            "reserve",
            tenant,
            request_id,
            tokens,
            _or_none(limits.requests_per_minute),
            _or_none(limits.tokens_per_minute),
            _or_none(limits.max_concurrent),
            _or_none(limits.tokens_per_day),
            microseconds(day_offset.total_seconds()),
            microseconds(self._settings.lease_s),
        )
        return reply

    def _refusal(
        self, refusal: int, tenant: str, tokens: int, limits: TenantLimits, wait_s: float | None
    ) -> LimitExceededError:
        reason, what = {
            1: (Reason.REQUEST_RATE, f"{limits.requests_per_minute} requests per minute"),
            2: (Reason.TOKEN_RATE, f"{limits.tokens_per_minute} tokens per minute"),
            3: (Reason.CONCURRENCY, f"{limits.max_concurrent} requests at a time"),
            4: (Reason.DAILY_BUDGET, f"{limits.tokens_per_day} tokens per day ({limits.time_zone})"),
        }[refusal]
        needs = f"; this request needs up to {tokens}" if reason in (Reason.TOKEN_RATE, Reason.DAILY_BUDGET) else ""
        message = f"the tenant's limit is {what}{needs}"
        return LimitExceededError(
            message,
            reason=reason,
            # Never too early, and not at the same moment for everybody who was refused.
            retry_after_s=None if wait_s is None else wait_s * self._uniform(1.0, 1.4),
            quotas=[QuotaViolation(f"tenant:{tenant}", message)],
        )

    async def _withdraw(self, reserving: asyncio.Task[Remaining], tenant: str, request_id: str) -> None:
        await asyncio.wait([reserving])
        if reserving.exception() is None:
            await self._settle(tenant, request_id, 0)

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Replaces the reservation by what was used. See `Limiter.settle`."""
        await self._shielded(self._settle(tenant, request_id, num_prompt_tokens + num_output_tokens))

    async def _settle(self, tenant: str, request_id: str, tokens: int) -> None:
        self._running.pop(request_id, None)
        try:
            await self._run("settle", tenant, request_id, tokens)
        except UnavailableError:
            self._unsettled[request_id] = tenant, tokens
            raise

    async def renew(self) -> None:
        """Says that the requests reserved here still run, and tells the store what it has lost or did not answer."""
        await self._shielded(self._renew())

    async def _renew(self) -> None:
        if self._running:
            arguments: list[Argument] = [microseconds(self._settings.lease_s)]
            for request_id, reservation in self._running.items():
                arguments += [reservation.tenant, request_id]
            for lost in await self._run("renew", *arguments):
                await self._restore(text(lost))
        for request_id, (tenant, tokens) in list(self._unsettled.items()):
            await self._run("settle", tenant, request_id, tokens)
            self._unsettled.pop(request_id, None)

    async def _restore(self, request_id: str) -> None:
        """Counts a running request again that the store has lost, whatever the limits say now."""
        reservation = self._running.get(request_id)
        if reservation is not None:
            no_limits = TenantLimits(time_zone=reservation.time_zone)
            await self._take(request_id, reservation.tenant, reservation.tokens, no_limits)
            if request_id not in self._running:  # it ended meanwhile
                self._unsettled.setdefault(request_id, (reservation.tenant, reservation.tokens))

    async def close(self) -> None:
        """Closes connections. What is reserved stays so until its leases expire."""
        await self._link.close()

    async def _shielded(self, call: Any) -> Any:
        return await asyncio.shield(self._link.start(call))

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._link.send(self._scripts[name], self._pool_keys, (self._keys.prefix, *arguments))


def _or_none(limit: int | None) -> int:
    return _NO_LIMIT if limit is None else limit
