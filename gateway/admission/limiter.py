"""The port of the tenants' limits: reserve before a request runs, settle when it has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import LimitExceededError, QuotaViolation
from common.types import Reason
from gateway.admission.limits import Remaining, TenantLimits


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request may use, in tokens."""

    num_prompt_tokens: int
    max_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of both kinds."""
        return self.num_prompt_tokens + self.max_output_tokens


class OverLimitError(LimitExceededError):
    """Over a limit of the tenant."""

    @classmethod
    def of(cls, refusal: tuple[Reason, str, str], retry_after_s: float | None, remaining: Remaining) -> OverLimitError:
        """`refusal`: reason, subject and description of the limit."""
        reason, subject, description = refusal
        quotas = [QuotaViolation(subject, description)]
        error = cls(description, reason=reason, retry_after_s=retry_after_s, quotas=quotas)
        error.budget = remaining.by_name()
        return error


class Limiter(Protocol):
    """Tenant limits over all gateways. Every method is one atomic change; all but `reserve` raise
    UnavailableError(STORE_UNAVAILABLE) when the store cannot be reached."""

    def reserve(
        self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits, *, patience_s: float = 60.0
    ) -> Coroutine[Any, Any, Remaining]:
        """Takes the whole cost, or raises LimitExceededError and charges nothing. One charge per request id.

        Sent by the call itself, and to be awaited for the answer.
        The error says when to come back, if that can help within the day, and what is left. A cancelled call is undone.
        If the store is silent for `patience_s` (0: is not asked), or cannot be reached, the gateway's share of the
        limits decides: it covers the cost, or UnavailableError(STORE_UNAVAILABLE) is raised. What the store then did
        nevertheless is undone or becomes the charge, and the share's use is charged with the next `renew`.
        """
        ...

    def settle(
        self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int
    ) -> Awaitable[None]:
        """Replaces the reservation by what was used. Idempotent. Sent by the call itself, and to be awaited for the
        answer. One that the store did not answer is repeated with the next `renew`."""
        ...

    def is_confirmed(self, request_id: str) -> bool:
        """Whether the store counts a running request; False while it is only known to come out of a share."""
        ...

    async def remaining(self, tenants: Mapping[str, TenantLimits]) -> list[Remaining]:
        """What is left of the limits of each now, whatever gateways hold of it."""
        ...

    async def renew(self) -> None:
        """Says that the requests reserved here and not settled still run: without it their concurrency slots expire.

        Charges what was admitted without the store, and renews the gateway's shares. A store that has lost what it knew
        is told again.
        """
        ...

    async def close(self) -> None:
        """Closes connections. What is reserved stays so until its leases expire."""
        ...


class Unlimited:
    """Every tenant may use everything."""

    async def reserve(
        self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits, *, patience_s: float = 60.0
    ) -> Remaining:
        """Never refuses."""
        return Remaining()

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Keeps nothing."""

    def is_confirmed(self, request_id: str) -> bool:
        """Always."""
        return True

    async def remaining(self, tenants: Mapping[str, TenantLimits]) -> list[Remaining]:
        """Everything."""
        return [Remaining() for _ in tenants]

    async def renew(self) -> None:
        """Keeps nothing."""

    async def close(self) -> None:
        """Keeps nothing."""
