"""Works on jobs: takes them from the store, generates their answers in the low band, and writes down how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import structlog

from common.errors import TidegateError, UnavailableError
from common.types import Band, FinishReason, JobState, Reason
from gateway.answer import Accepted, Finished, TextDelta
from gateway.background import Background
from gateway.handler import Handler
from gateway.jobs import JobEnd, JobRun, JobStore
from gateway.requests import GenerateCall
from gateway.store_health import StoreHealth
from gateway.tenants import Tenants

_log = structlog.get_logger(__name__)

_POLL_S = 0.5
_FIRST_DELAY_S = 1.0  # before a run after one that could not be served
_MAX_DELAY_S = 60.0
_TRANSIENT = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "ALREADY_EXISTS"})


@dataclass(frozen=True, slots=True)
class JobCodec:
    """Between what the store keeps of a job and what the handler takes and gives."""

    decode: Callable[[bytes], GenerateCall]
    encode: Callable[[Accepted, list[TextDelta], Finished], bytes]


class JobRunner:
    """Owner of this gateway's runs. A run whose lease is lost stops; its job goes on where its journal ends."""

    def __init__(
        self,
        jobs: JobStore,
        handler: Handler,
        tenants: Tenants,
        store: StoreHealth,
        codec: JobCodec,
        *,
        num_at_once: int,
        lease_s: float,
    ) -> None:
        """`lease_s`: after this long without a sign of life of a run another gateway takes its job."""
        self._jobs = jobs
        self._handler = handler
        self._tenants = tenants
        self._store = store
        self._codec = codec
        self._num_at_once = num_at_once
        self._lease_s = lease_s
        self._runs: set[asyncio.Task[None]] = set()

    def start(self, background: Background) -> None:
        """Starts the loop."""
        background.run(self._loop, "jobs")

    async def _loop(self) -> None:
        try:
            while True:
                await self._take()
                await asyncio.sleep(_POLL_S)
        finally:
            for run in self._runs:
                run.cancel()

    async def _take(self) -> None:
        room = self._num_at_once - len(self._runs)
        if room <= 0 or not self._store.is_up:
            return
        with self._store.watched():
            for run in await self._jobs.claim(limit=room, lease_s=self._lease_s):
                task = asyncio.create_task(self._work(run), name=f"job {run.job_id}")
                self._runs.add(task)
                task.add_done_callback(self._runs.discard)

    async def stop(self) -> None:
        """Ends the runs, whose jobs others take at once."""
        self._num_at_once = 0
        runs = list(self._runs)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def close(self) -> None:
        """Closes the store."""
        await self._jobs.close()

    async def _work(self, run: JobRun) -> None:
        structlog.contextvars.bind_contextvars(tenant=run.tenant, job_id=run.job_id, run=run.number)
        progress = _Progress()
        keeping = asyncio.create_task(self._keep(run, progress))
        generating = asyncio.create_task(self._generate(run, progress))
        try:
            await asyncio.wait([keeping, generating], return_when=asyncio.FIRST_COMPLETED)
            if not generating.done():  # cancelled, or another's by now
                return
            end = generating.result()
            with self._store.watched():
                if end is not None:
                    await self._jobs.finish(run, end, num_output_tokens=progress.num_tokens)
        except asyncio.CancelledError:
            await _stopped(generating)
            with self._store.watched():
                await self._jobs.release(run, delay_s=0.0)
            raise
        except TidegateError as error:
            await self._give_back(run, error)
        finally:
            await _stopped(keeping, generating)

    async def _give_back(self, run: JobRun, error: TidegateError) -> None:
        """Again later, if that can help; else the job has failed."""
        with self._store.watched():
            if error.status in _TRANSIENT and error.reason is not Reason.DAILY_BUDGET:
                delay_s = error.retry_after_s or _FIRST_DELAY_S * 2 ** min(run.number, 6)
                await self._jobs.release(run, delay_s=min(delay_s, _MAX_DELAY_S))
            else:
                end = JobEnd(JobState.FAILED, reason=error.reason, message=error.message)
                await self._jobs.finish(run, end, num_output_tokens=0)

    async def _keep(self, run: JobRun, progress: _Progress) -> None:
        """Renews the lease until it is lost."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            with self._store.watched():
                if not await self._jobs.renew(run, lease_s=self._lease_s, num_output_tokens=progress.num_tokens):
                    return

    async def _generate(self, run: JobRun, progress: _Progress) -> JobEnd | None:
        """The job's end; None if another run has taken over. Raises TidegateError."""
        tenant = self._tenants.find(run.tenant)
        if tenant is None:
            return JobEnd(JobState.FAILED, reason=Reason.UNKNOWN_CREDENTIAL, message="the tenant is not known any more")
        # The key lets a later run go on with what this one has generated.
        key = f"job {run.job_id}"
        call = replace(self._codec.decode(run.request), request_id="", idempotency_key=key, band=Band.LOW)
        accepted: Accepted | None = None
        deltas: list[TextDelta] = []
        async with aclosing(self._handler.generate(tenant, call, None)) as events:
            async for event in events:
                match event:
                    case Accepted():
                        accepted = event
                    case TextDelta():
                        deltas.append(event)
                        progress.num_tokens = event.offset
                    case Finished() if event.reason is FinishReason.CANCELLED:
                        return None
                    case Finished():
                        assert accepted is not None, "an answer starts with Accepted"
                        return JobEnd(JobState.DONE, result=self._codec.encode(accepted, deltas, event))
        raise UnavailableError("the answer has no end")


@dataclass(slots=True)
class _Progress:
    num_tokens: int = 0


async def _stopped(*tasks: asyncio.Task[object]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
