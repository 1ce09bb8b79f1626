"""The port of the ledger: what every accepted request has used, written once when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class UsageRecord(NamedTuple):
    """What one request has used so far, and how it ended if it has. Times in seconds, `*_at` since 1970 UTC.

    A resumable request that is gone on with after its end has a record for each run, which counts what that run did.
    """

    record_id: str  # unique; a request id may be used again
    request_id: str  # in the fleet: contains the tenant
    tenant: str
    band: str
    model: str
    prompt_tokens: int  # of the prompt, once, however often it was computed; 0 if a former run counts it
    cached_prompt_tokens: int  # of these, found in a prefix cache by the first attempt
    generated_tokens: int  # received from workers
    delivered_tokens: int  # handed to the client
    recomputed_tokens: int  # of prompt and output, computed again because a worker was lost or drained
    num_attempts: int
    accepted_at: float
    queue_s: float  # until a worker took it, or until now
    ttft_s: float  # from arrival; 0 without a token
    total_s: float  # from arrival
    outcome: str = ""  # state at the end; empty while it lives
    reason: str = ""  # of the finish, or of the error


class Ledger(Protocol):
    """Every opened record is closed exactly once: by its gateway, or, should that die, by another one.

    A gateway that was only taken for dead replaces what the other wrote.

    All methods raise UnavailableError(STORE_UNAVAILABLE) when the store cannot be reached.
    """

    def open(self, record: UsageRecord) -> asyncio.Future[Any]:
        """Says that a request is accepted. On its way to the store when the call returns, so that what its client is
        told afterwards is not lost with this gateway; to be awaited for the answer."""
        ...

    async def note(self, records: Sequence[UsageRecord]) -> None:
        """Renews open records, so that little is lost with this gateway. Those that are not open stay closed."""
        ...

    def close(self, record: UsageRecord) -> asyncio.Future[bool]:
        """Writes a record for good. False, and nothing is written, if that was done already. May be repeated.

        Sent by the call itself, and to be awaited for the answer.
        """
        ...

    async def reap(self) -> int:
        """Closes what dead gateways left open, as last noted, with outcome "lost"; returns how many.

        Settles what they had reserved of tenants' limits, too, unless another gateway has taken a request over.
        """
        ...

    async def leave(self) -> None:
        """This gateway closes: what it has left open is reaped by others. Closes connections."""
        ...
