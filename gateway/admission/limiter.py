"""The port of the tenants' limits: reserve before a request runs, settle when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.admission.limits import Remaining, TenantLimits


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request may use, in tokens."""

    num_prompt_tokens: int
    max_output_tokens: int


class Limiter(Protocol):
    """Tenant limits over all gateways. Every method is one atomic change; all raise UnavailableError(STORE_UNAVAILABLE)
    when the store cannot be reached."""

    async def reserve(self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits) -> Remaining:
        """Takes the whole cost, or raises LimitExceededError and writes nothing. One charge per request id.

        The error says when to come back, if that can help within the day. A cancelled call is undone; one whose
        outcome the store did not tell is undone with the next `renew`.
        """
        ...

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Replaces the reservation by what was used. Idempotent. One that the store did not answer is repeated with
        the next `renew`."""
        ...

    async def renew(self) -> None:
        """Says that the requests reserved here and not settled still run: without it their concurrency slots expire.

        A store that has lost them counts them again.
        """
        ...

    async def close(self) -> None:
        """Closes connections. What is reserved stays so until its leases expire."""
        ...


class Unlimited:
    """Every tenant may use everything."""

    async def reserve(self, tenant: str, request_id: str, cost: Cost, limits: TenantLimits) -> Remaining:
        """Never refuses."""
        return Remaining()

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Keeps nothing."""

    async def renew(self) -> None:
        """Keeps nothing."""

    async def close(self) -> None:
        """Keeps nothing."""
