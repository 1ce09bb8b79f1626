"""Clients of several tenants that ask without a break, as clients do: they retry, resume, cancel and give up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import redis

from client import Accepted, ClientError, Delta, Event, Finished, Text
from client.jobs import Job
from common.types import FinishReason, JobState, Reason
from tests.chaos.cluster import HEARTBEAT_TTL_S, Cluster
from tests.chaos.node import Span, eventually
from tests.chaos.questions import Question

KINDS = {"plain": 8, "resumable": 4, "keyed": 3, "cancelled": 2, "left": 2, "late": 1, "job": 2}
ANSWER_S = 240.0  # for a whole answer, through whatever happens
RETRY_S = 0.1
MAX_REFUSALS = 20  # then a client that was never accepted asks something else: it would stand in the way of the others
_LOOK_S = 0.1
_SILENCE_S = 0.03  # for which gateways have patience with the store
_LATE_S = HEARTBEAT_TTL_S / 2  # of a gateway's sign of life, or the store's: there is no telling what is taken for dead
# What a client may hear before its request is accepted, and then asks again.
_TRY_AGAIN = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"})


@dataclass(slots=True)
class Call:
    """One request, as its client saw it. A request that goes on elsewhere is one call with several streams."""

    number: int
    kind: str
    tenant: str
    question: Question
    request_id: str = ""
    gateway: int = 0  # that was asked last
    gateways: set[int] = field(default_factory=set)  # that have accepted it
    sent_at: float = 0.0  # monotonic; of the try that was accepted
    accepted_at: float | None = None
    ended_at: float | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    offset: int = 0
    num_streams: int = 0  # that were accepted
    finished: list[Finished] = field(default_factory=list)
    failures: list[ClientError] = field(default_factory=list)  # of streams that were accepted
    refusals: list[ClientError] = field(default_factory=list)  # before that
    job: Job | None = None
    fault: str = ""  # what the client thinks was wrong

    def take(self, event: Event) -> None:
        """Notes what came."""
        if isinstance(event, Accepted):
            self.num_streams += 1
            self.gateways.add(self.gateway)
            self.request_id = event.request_id
            self.accepted_at = self.accepted_at or time.monotonic()
        elif isinstance(event, Delta):
            self.text += event.text
            self.token_ids += event.token_ids
            self.offset = event.offset or self.offset
        else:
            self.finished.append(event)


class Traffic:
    """`running` keeps a number of calls going; afterwards `calls` are all that were made, every one at its end."""

    def __init__(self, cluster: Cluster, questions: list[Question], seed: int) -> None:
        self._cluster = cluster
        self._questions = questions
        self._random = Random(seed)
        self._name = f"{seed}-{time.time_ns() // 1_000_000 % 10**9}"
        self._numbers = itertools.count()
        self._is_stopping = False
        self.calls: list[Call] = []
        self.num_tokens = 0
        self.silences: list[Span] = []  # of the store, as far as they were noticed here
        self.lapses: list[float] = []  # when somebody may soon have been taken for dead
        self.kinds = KINDS
        self.may_break = False  # streams of gateways that are killed or drained break, unless they can be resumed

    @asynccontextmanager
    async def running(self, num_calls: int = 12) -> AsyncIterator[None]:
        """Asks while it is open; waits for every answer at the end."""
        askers = [asyncio.create_task(self._ask_on()) for _ in range(num_calls)]
        watching = asyncio.create_task(self._watch_store())
        try:
            yield
            self._is_stopping = True
            async with asyncio.timeout(ANSWER_S + 30):
                await asyncio.gather(*askers)
            if watching.done():
                watching.result()
        finally:
            for task in (watching, *askers):
                task.cancel()
            await asyncio.gather(watching, *askers, return_exceptions=True)

    async def _watch_store(self) -> None:
        async with self._cluster.watching_store() as signs_of_life:
            heard_at = time.monotonic()
            while True:
                asked_at = time.monotonic()
                try:
                    left_s = await signs_of_life()
                except redis.RedisError:
                    await asyncio.sleep(_LOOK_S)
                    continue
                now = time.monotonic()
                silent_since, heard_at = min(asked_at, heard_at + _LOOK_S), now
                if now - silent_since > _SILENCE_S:
                    self._note_silence(silent_since, now)
                if now - silent_since > _LATE_S:
                    self.lapses.append(silent_since)
                if min(left_s, default=0.0) < HEARTBEAT_TTL_S - _LATE_S:
                    self.lapses.append(asked_at)
                await asyncio.sleep(_LOOK_S)

    def _note_silence(self, start: float, end: float) -> None:
        if self.silences and start - self.silences[-1][1] < 1.0:
            start = self.silences.pop()[0]
        self.silences.append((start, end))

    async def more(self, num_tokens: int = 800) -> None:
        """Waits until so many more tokens have come."""
        wanted = self.num_tokens + num_tokens
        await eventually(lambda: self.num_tokens >= wanted, f"{num_tokens} more tokens")

    async def _ask_on(self) -> None:
        while not self._is_stopping:
            await self.ask()

    async def ask(self, kind: str = "", tenant: str = "") -> Call:
        """Makes one call, drawn at random where nothing is said, and sees it through."""
        random = self._random
        kind = kind or random.choices(list(self.kinds), list(self.kinds.values()))[0]
        tenant = tenant or random.choice(("paying", "regular", "batch", "limited"))
        call = Call(next(self._numbers), kind, "batch" if kind == "job" else tenant, random.choice(self._questions))
        self.calls.append(call)
        try:
            async with asyncio.timeout(ANSWER_S):
                if kind == "job":
                    await self._ask_job(call)
                else:
                    await self._ask_stream(call, random.randrange(2), Random(random.random()))
        except TimeoutError:
            call.fault = call.fault or f"no end within {ANSWER_S:g} s"
        call.ended_at = time.monotonic()
        return call

    async def _ask_stream(self, call: Call, gateway: int, random: Random) -> None:
        name = f"{self._name}-{call.number}"
        leaves_after = random.randrange(1, 40) if call.kind in ("cancelled", "left") else None
        timeout_s = random.uniform(0.1, 1.0) if call.kind == "late" else None
        while True:
            client = self._cluster.client(call.tenant, gateway)
            if call.kind == "resumable" and call.num_streams:
                events = client.resume(call.request_id, call.offset)
            else:
                call.text, call.token_ids = "", []  # a key brings all of it again
                events = client.generate(
                    Text(call.question.prompt),
                    call.question.sampling,
                    request_id="" if call.kind == "keyed" else f"{name}-{len(call.refusals)}",
                    resumable=call.kind == "resumable",
                    idempotency_key=name if call.kind == "keyed" else "",
                    return_token_ids=True,
                    timeout_s=timeout_s,
                )
            num_streams, call.gateway = call.num_streams, gateway
            call.sent_at = time.monotonic() if call.accepted_at is None else call.sent_at
            try:
                await self._read(call, events, leaves_after, 1 - gateway)
                return
            except ClientError as error:
                if not self._goes_on(call, error, was_accepted=call.num_streams > num_streams):
                    return
            await asyncio.sleep(RETRY_S)
            gateway = 1 - gateway

    def _goes_on(self, call: Call, error: ClientError, *, was_accepted: bool) -> bool:
        """Whether the client asks again after a failure."""
        if call.kind == "late" and error.status == "DEADLINE_EXCEEDED":
            call.failures.append(error)
            return False
        if not was_accepted:
            call.refusals.append(error)
            if error.status not in _TRY_AGAIN and not (call.kind == "resumable" and error.status == "NOT_FOUND"):
                call.fault = f"refused with {error}"
                return False
            has_patience = not self._is_stopping and len(call.refusals) < MAX_REFUSALS
            return call.num_streams > 0 or has_patience
        call.failures.append(error)
        is_break = error.status == "UNAVAILABLE" and error.reason in (None, Reason.DRAINING)
        if not is_break or not self.may_break:
            call.fault = f"failed with {error}"
            return False
        return call.kind in ("resumable", "keyed")

    async def _read(
        self, call: Call, events: AsyncGenerator[Event, None], leaves_after: int | None, other: int
    ) -> None:
        async with aclosing(events):
            async for event in events:
                call.take(event)
                if isinstance(event, Delta):
                    self.num_tokens += len(event.token_ids)
                if leaves_after is not None and len(call.token_ids) >= leaves_after and not call.finished:
                    if call.kind == "left":
                        return
                    leaves_after = None
                    try:
                        await self._cluster.client(call.tenant, other).cancel(call.request_id)
                    except ClientError as error:  # it has just ended, or the other gateway is away
                        if error.status not in ("NOT_FOUND", "UNAVAILABLE"):
                            call.fault = f"cancel: {error}"

    async def _ask_job(self, call: Call) -> None:
        call.request_id = f"{self._name}-{call.number}"
        ended = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
        is_submitted = False
        for gateway in itertools.cycle((0, 1)):
            client = self._cluster.client(call.tenant, gateway)
            try:
                if not is_submitted:
                    prompt = Text(call.question.prompt)
                    await client.submit_job(prompt, call.question.sampling, job_id=call.request_id, timeout_s=5)
                    is_submitted = True
                job = await client.get_job(call.request_id, timeout_s=5)
                if job.state in ended:
                    call.job = job
                    return
            except ClientError as error:
                if error.status not in (*_TRY_AGAIN, "DEADLINE_EXCEEDED"):
                    call.fault = f"job: {error}"
                    return
                if self._is_stopping and not is_submitted:
                    call.refusals.append(error)
                    return
            await asyncio.sleep(RETRY_S)


def is_whole(call: Call) -> bool:
    """Whether the call was to be answered in full."""
    return call.finished != [] and call.finished[-1].reason is not FinishReason.CANCELLED
