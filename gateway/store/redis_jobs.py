"""Jobs in Redis: a hash for each, one line of those that are due, and a list for each tenant."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from common.errors import LimitExceededError
from common.types import JobState, Reason
from gateway.jobs import Job, JobEnd, JobRun
from gateway.store.connection import Argument, Link, Trunk, text
from gateway.store.keys import PoolKeys

_TIMEOUT_S = 2.0
_SCRIPTS = ("submit", "get", "list", "cancel", "claim", "renew", "release", "finish")
_FIELDS = (
    "state",
    "output_tokens",
    "created_at",
    "ended_at",
    "runs",
    "digest",
    "result",
    "reason",
    "message",
)


class RedisJobStore:
    """The `JobStore` of a pool. Made without I/O; belongs to one event loop."""

    def __init__(
        self, store: str | Trunk, *, pool: str, ttl_s: float, max_jobs: int, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """`ttl_s`: how long a job is kept after its end; `max_jobs`: of one tenant, ended ones included."""
        self._keys = PoolKeys(pool)
        self._ttl_ms = round(ttl_s * 1000)
        self._max_jobs = max_jobs
        self._link = Link(store, timeout_s=timeout_s)
        self._scripts = {name: self._link.script(f"job_{name}", ("job_common",)) for name in _SCRIPTS}

    async def submit(self, tenant: str, job_id: str, request: bytes, digest: str) -> bool:
        """Keeps a job. See `JobStore.submit`."""
        packed = b64encode(request).decode()
        outcome = int(await self._run("submit", tenant, job_id, packed, digest, self._max_jobs))
        if outcome < 0:
            raise LimitExceededError(f"the tenant has {self._max_jobs} jobs, the most that is allowed")
        return outcome == 1

    async def get(self, tenant: str, job_id: str) -> Job | None:
        """A job. See `JobStore.get`."""
        reply = await self._run("get", tenant, job_id, *_FIELDS)
        return _job(tenant, job_id, reply) if reply is not None else None

    async def page(self, tenant: str, *, limit: int, before: str) -> tuple[list[Job], str]:
        """Jobs, newest first. See `JobStore.page`."""
        after, found = await self._run("list", tenant, limit, before, *(it for it in _FIELDS if it != "result"))
        jobs = [_job(tenant, text(job_id), [*values[:6], b"", *values[6:]]) for job_id, values in found]
        return jobs, text(after)

    async def cancel(self, tenant: str, job_id: str) -> None:
        """Ends a job that has not ended. See `JobStore.cancel`."""
        await self._run("cancel", tenant, job_id, self._ttl_ms)

    async def claim(self, *, limit: int, lease_s: float) -> list[JobRun]:
        """Takes jobs that are due. See `JobStore.claim`."""
        runs = await self._run("claim", limit, round(lease_s * 1e6))
        return [
            JobRun(text(tenant), text(job_id), int(number), b64decode(request))
            for tenant, job_id, number, request in runs
        ]

    async def renew(self, run: JobRun, *, lease_s: float, num_output_tokens: int) -> bool:
        """Keeps a run. See `JobStore.renew`."""
        return bool(
            await self._run("renew", run.tenant, run.job_id, run.number, round(lease_s * 1e6), num_output_tokens)
        )

    async def release(self, run: JobRun, *, delay_s: float) -> None:
        """Puts a job back. See `JobStore.release`."""
        await self._run("release", run.tenant, run.job_id, run.number, round(delay_s * 1e6))

    async def finish(self, run: JobRun, end: JobEnd, *, num_output_tokens: int) -> bool:
        """Ends a job. See `JobStore.finish`."""
        arguments = (
            run.tenant,
            run.job_id,
            run.number,
            self._ttl_ms,
            int(end.state),
            num_output_tokens,
            b64encode(end.result).decode(),
            "" if end.reason is None else end.reason.name,
            end.message,
        )
        return bool(await self._run("finish", *arguments))

    async def close(self) -> None:
        """Closes connections once the calls under way have ended."""
        await self._link.close()

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._link.send(self._scripts[name], [self._keys.jobs_due], (self._keys.prefix, *arguments))


def _job(tenant: str, job_id: str, values: Any) -> Job:
    state, num_tokens, created_at, ended_at, num_runs, digest, result, reason, message = (
        text(value) if value is not None else "" for value in values
    )
    return Job(
        tenant=tenant,
        job_id=job_id,
        state=JobState(int(state)),
        num_output_tokens=int(num_tokens),
        created_at=int(created_at) / 1e6,
        ended_at=int(ended_at) / 1e6,
        num_runs=int(num_runs),
        digest=digest,
        result=b64decode(result),
        reason=Reason[reason] if reason else None,
        message=message,
    )
