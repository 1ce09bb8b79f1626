"""Clocks, sessions and a queue that a test steers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common.errors import UnavailableError
from common.types import Band, ModelDescription, ModelLimits, Reason, SamplingParams
from gateway.admission.limits import NO_LIMITS, TenantLimits
from gateway.live import LiveRequest, ReadyRequest
from gateway.placement.model import ServedModel
from gateway.placement.worker import Submission, WorkerState
from gateway.queueing.queue import (
    Claim,
    Flow,
    FlowDepth,
    InboxMessage,
    Place,
    Position,
    QueueDepth,
    QueueEntry,
    WorkerRecord,
    WorkerReport,
)
from gateway.tenants import Tenant
from gateway.text import TextModel
from tests.support.scripted_worker import END_ID, MODEL, TEMPLATE, VOCAB_SIZE, tokenizer_json

LIMITS = ModelLimits(MODEL, 100, VOCAB_SIZE, 16, 5, 4)
DESCRIPTION = ModelDescription(LIMITS, tokenizer_json(), TEMPLATE, (END_ID,), None, False, "<|start|>", "<|end|>")
TEXT = TextModel(DESCRIPTION)
SERVED = ServedModel(DESCRIPTION, TEXT)
ACME = Tenant("acme", Band.NORMAL)


def served(**changes: object) -> ServedModel:
    return ServedModel(replace(DESCRIPTION, limits=replace(LIMITS, **changes)), TEXT)  # type: ignore[arg-type]


def live_request(
    request_id: str = "r1", *, max_tokens: int = 50, stop: tuple[str, ...] = (), limits: TenantLimits = NO_LIMITS
) -> LiveRequest:
    tenant = replace(ACME, limits=limits)
    ready = ReadyRequest(request_id, tenant, Band.NORMAL, SERVED, (1, 2, 3), SamplingParams(7, max_tokens), stop, True)
    return LiveRequest(ready, arrived=0.0)


@dataclass
class FakeClock:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeSession:
    worker_id: str = "w1"
    epoch: int = 1
    state: WorkerState = WorkerState.READY
    limits: ModelLimits = LIMITS
    submitted: list[Submission] = field(default_factory=list)
    sent: list[tuple[Submission, bool]] = field(default_factory=list)  # the same, and whether alone
    aborted: list[tuple[str, int]] = field(default_factory=list)
    paused: list[tuple[str, int, bool]] = field(default_factory=list)

    def submit(self, submission: Submission, *, is_alone: bool) -> None:
        if self.state is not WorkerState.READY:
            raise UnavailableError("over", reason=Reason.WORKER_LOST)
        self.submitted.append(submission)
        self.sent.append((submission, is_alone))

    def abort(self, request_id: str, attempt: int) -> None:
        self.aborted.append((request_id, attempt))

    def set_paused(self, request_id: str, attempt: int, is_paused: bool) -> None:
        self.paused.append((request_id, attempt, is_paused))


@dataclass(eq=False)
class FakeQueue:
    """Answers what the test has put in; remembers what it was told. `is_down` makes every call fail."""

    is_down: bool = False
    claims: list[Claim] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    reports: list[WorkerReport] = field(default_factory=list)
    requeued: list[tuple[str, int, Place, int]] = field(default_factory=list)
    renewed: list[QueueEntry] = field(default_factory=list)  # entries of what was requeued
    reached: list[list[str]] = field(default_factory=list)
    enqueued: list[QueueEntry] = field(default_factory=list)
    charged: list[dict[Flow, int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    forgotten: list[tuple[str, int]] = field(default_factory=list)

    def _answer(self) -> None:
        if self.is_down:
            raise UnavailableError("down", reason=Reason.STORE_UNAVAILABLE)

    def enqueue(
        self, entry: QueueEntry, *, max_length: int, max_of_tenant: int | None = None, if_reserved: bool = False
    ) -> asyncio.Future[bool]:
        entering: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            self._answer()
        except UnavailableError as error:
            entering.set_exception(error)
        else:
            self.enqueued.append(entry)
            entering.set_result(True)
        return entering

    def dispatch(self, reports: Sequence[WorkerReport] = ()) -> asyncio.Future[list[Claim]]:
        run: asyncio.Future[list[Claim]] = asyncio.get_running_loop().create_future()
        try:
            self._answer()
        except UnavailableError as error:
            run.set_exception(error)
            return run
        self.reports.extend(reports)
        claims, self.claims = self.claims, []
        run.set_result(claims)
        return run

    async def requeue(self, entry: QueueEntry, *, attempt: int, place: Place) -> bool:
        self._answer()
        self.requeued.append((entry.request_id, attempt, place, entry.num_input_tokens))
        self.renewed.append(entry)
        return True

    async def charge(self, output_tokens: Mapping[Flow, int]) -> None:
        self._answer()
        self.charged.append(dict(output_tokens))

    async def finish(self, request_id: str) -> bool:
        self._answer()
        self.finished.append(request_id)
        return True

    async def owner_of(self, request_id: str) -> str | None:
        self._answer()
        return None

    async def send_cancel(self, request_id: str) -> bool:
        self._answer()
        return False

    async def read_inbox(self, *, timeout_s: float) -> list[InboxMessage]:
        self._answer()
        return []

    async def announce(self, worker: WorkerRecord, *, ttl_s: float) -> None:
        self._answer()

    async def workers(self) -> list[WorkerRecord]:
        self._answer()
        return []

    async def reach(self, worker_ids: Collection[str], *, ttl_s: float) -> None:
        self._answer()
        self.reached.append(list(worker_ids))

    async def forget_worker(self, worker_id: str, *, epoch: int) -> None:
        self._answer()
        self.forgotten.append((worker_id, epoch))

    async def heartbeat(self, *, ttl_s: float) -> list[str]:
        self._answer()
        return self.unknown

    async def depths(self) -> list[QueueDepth]:
        self._answer()
        return []

    async def flow_depths(self) -> list[FlowDepth]:
        self._answer()
        return []

    async def position(self, request_id: str) -> Position | None:
        self._answer()
        return None

    async def close(self) -> None: ...
