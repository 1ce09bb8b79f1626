"""The port of the job store: requests that are kept until they are answered, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.types import JobState, Reason


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the store knows it; times in seconds since 1970 UTC."""

    tenant: str
    job_id: str
    state: JobState
    num_output_tokens: int
    created_at: float
    ended_at: float  # 0 while it has not ended
    num_runs: int
    digest: str  # of the request
    result: bytes = b""
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class JobRun:
    """A job in the hands of a gateway for as long as its lease is renewed."""

    tenant: str
    job_id: str
    number: int  # of the run, from 1
    request: bytes


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ends: DONE with a result, or FAILED with reason and message."""

    state: JobState
    result: bytes = b""
    reason: Reason | None = None
    message: str = ""


class JobStore(Protocol):
    """Jobs of all tenants of a pool. A job ends once: a run that is no longer its run changes nothing.

    All methods raise UnavailableError(STORE_UNAVAILABLE) when the store cannot be reached.
    """

    async def submit(self, tenant: str, job_id: str, request: bytes, digest: str) -> bool:
        """Keeps a job. False, and no change, if there is one with this id.

        Raises LimitExceededError(QUEUE_FULL) if the tenant has too many.
        """
        ...

    async def get(self, tenant: str, job_id: str) -> Job | None:
        """A job; None if it is unknown or forgotten."""
        ...

    async def page(self, tenant: str, *, limit: int, before: str) -> tuple[list[Job], str]:
        """About `limit` jobs without results, newest first, and what to give as `before` for more; empty: no more."""
        ...

    async def cancel(self, tenant: str, job_id: str) -> None:
        """Ends a job that has not ended."""
        ...

    async def claim(self, *, limit: int, lease_s: float) -> list[JobRun]:
        """Takes jobs that wait, or whose lease has passed, longest due first."""
        ...

    async def renew(self, run: JobRun, *, lease_s: float, num_output_tokens: int) -> bool:
        """Keeps a run and shows its progress. False if it is over: cancelled, or another's by now."""
        ...

    async def release(self, run: JobRun, *, delay_s: float) -> None:
        """Puts a job back, to be run again after a while."""
        ...

    async def finish(self, run: JobRun, end: JobEnd, *, num_output_tokens: int) -> bool:
        """Ends a job. False, and no change, if the run is over."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...
