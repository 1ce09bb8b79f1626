"""The port of the tenants' limits: reserve before a request runs, settle when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request may use, in tokens."""

    num_prompt_tokens: int
    max_output_tokens: int


class Limiter(Protocol):
    """Tenant limits over all gateways."""

    async def reserve(self, tenant: str, request_id: str, cost: Cost) -> None:
        """Takes the whole cost or raises LimitExceededError, which writes nothing. One charge per request id."""
        ...

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Replaces the reservation by what was used. Idempotent."""
        ...


class Unlimited:
    """Every tenant may use everything."""

    async def reserve(self, tenant: str, request_id: str, cost: Cost) -> None:
        """Never refuses."""

    async def settle(self, tenant: str, request_id: str, *, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Keeps nothing."""
