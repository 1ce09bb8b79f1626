"""What operators call: the fleet as this gateway sees it, why a request waits, drains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.clock import Clock
from common.errors import InvalidRequestError, NotFoundError, UnavailableError
from common.types import BlockUsage, ModelLimits
from gateway.dispatcher import Dispatcher
from gateway.lifecycle import RequestState
from gateway.live import LiveRequest, fleet_request_id
from gateway.placement.worker import WorkerState
from gateway.queueing.queue import Queue, WorkerRecord
from gateway.rpc.dialer import WorkerDialer
from gateway.rpc.endings import Ending, Endings
from gateway.rpc.worker_session import GrpcWorkerSession
from gateway.tenants import Tenants
from protos.inference.v1 import admin_pb2, admin_pb2_grpc, types_pb2

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
register = admin_pb2_grpc.add_AdminServicer_to_server

_NO_SESSION = "no session"


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """Who answers, and what it takes for a claim; see GatewaySettings."""

    gateway_id: str


class AdminService(admin_pb2_grpc.AdminServicer):
    """Reads what others own and changes nothing but by a drain. Must stand behind the admin key's authenticator."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        dialer: WorkerDialer,
        queue: Queue,
        tenants: Tenants,
        endings: Endings,
        clock: Clock,
        settings: AdminSettings,
        *,
        begin_drain: Callable[[], None],
    ) -> None:
        """`begin_drain` makes the program stop as a signal would."""
        self._dispatcher = dispatcher
        self._dialer = dialer
        self._queue = queue
        self._tenants = tenants
        self._endings = endings
        self._clock = clock
        self._settings = settings
        self._begin_drain = begin_drain

    async def ListWorkers(self, request: admin_pb2.ListWorkersRequest, context: Any) -> admin_pb2.ListWorkersResponse:
        """Workers with a session here, and announced ones."""
        records = {record.worker_id: record for record in await self._queue.workers()}
        statuses = {worker_id: _announced(record) for worker_id, record in records.items()}
        for address, session in self._dialer.sessions.items():
            if session.worker_id:
                is_announced = session.worker_id in records
                statuses[session.worker_id] = _connected(address, session, is_announced=is_announced)
        workers = [statuses[worker_id] for worker_id in sorted(statuses)]
        return admin_pb2.ListWorkersResponse(gateway_id=self._settings.gateway_id, workers=workers)

    async def ShowQueue(self, request: admin_pb2.ShowQueueRequest, context: Any) -> admin_pb2.ShowQueueResponse:
        """The fleet's queue by band."""
        bands = [
            admin_pb2.BandDepth(
                band=types_pb2.Band.ValueType(depth.band),
                num_waiting=depth.num_waiting,
                oldest_wait_s=depth.oldest_wait_s,
            )
            for depth in await self._queue.depths()
        ]
        return admin_pb2.ShowQueueResponse(bands=bands)

    async def ListTenants(self, request: admin_pb2.ListTenantsRequest, context: Any) -> admin_pb2.ListTenantsResponse:
        """Tenants and their limits."""
        num_live: dict[str, int] = {}
        for live in self._dispatcher.live:
            tenant_id = live.request.tenant.tenant_id
            num_live[tenant_id] = num_live.get(tenant_id, 0) + 1
        tenants = [
            admin_pb2.TenantStatus(
                tenant_id=tenant.tenant_id,
                max_band=types_pb2.Band.ValueType(tenant.band),
                weight=tenant.weight,
                limits=tenant.limits.described(),
                num_live=num_live.get(tenant.tenant_id, 0),
            )
            for tenant in self._tenants.all
        ]
        return admin_pb2.ListTenantsResponse(tenants=tenants)

    async def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: Any
    ) -> admin_pb2.ExplainRequestResponse:
        """What is known of a request here, or which gateway knows more."""
        if not request.tenant_id or not request.request_id:
            raise InvalidRequestError.of_field("request_id", "and tenant_id are both needed")
        fleet_id = fleet_request_id(request.tenant_id, request.request_id)
        live = self._dispatcher.find(fleet_id)
        if live is not None and not live.lifecycle.is_ended:
            return await self._explain_live(live)
        owner = await self._queue.owner_of(fleet_id)
        if owner is not None and owner != self._settings.gateway_id:
            text = f"gateway {owner} holds the client's stream; ask it"
            return admin_pb2.ExplainRequestResponse(state="elsewhere", explanation=text, gateway_id=owner)
        ending = self._endings.find(fleet_id)
        if ending is not None:
            return self._explain_ending(ending)
        text = "no gateway holds it: it ended well, or long ago, or was refused by another gateway, or never came"
        return admin_pb2.ExplainRequestResponse(state="unknown", explanation=text)

    def _explain_ending(self, ending: Ending) -> admin_pb2.ExplainRequestResponse:
        error = ending.error
        again = (
            "" if error.retry_after_s is None else f"; the client was told to come back in {error.retry_after_s:.1f} s"
        )
        return admin_pb2.ExplainRequestResponse(
            state="refused",
            explanation=f"{error.status}/{error.reason.name}: {error.message}{again}",
            gateway_id=self._settings.gateway_id,
            age_s=self._clock.monotonic() - ending.at,
            reason=types_pb2.Reason.ValueType(error.reason.value),
        )

    async def _explain_live(self, live: LiveRequest) -> admin_pb2.ExplainRequestResponse:
        request, now, claim = live.request, self._clock.monotonic(), live.claim
        is_waiting = live.lifecycle.state is RequestState.QUEUED
        entry = self._dispatcher.entry_of(live)
        answer = admin_pb2.ExplainRequestResponse(
            state=live.lifecycle.state.value,
            gateway_id=self._settings.gateway_id,
            band=types_pb2.Band.ValueType(request.band),
            model=request.model.limits.model,
            age_s=now - live.arrived,
            waited_s=now - live.queued_at if is_waiting else (live.taken_at or now) - live.accepted_at,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(live.output_token_ids),
            tokens_needed=entry.num_tokens_needed,
            worker_id=claim.worker_id if claim is not None else "",
            attempt=claim.attempt if claim is not None else 0,
            num_losses=live.num_losses,
        )
        if not is_waiting:
            answer.explanation = f"worker {answer.worker_id} has it" if claim is not None else "it is about to end"
            return answer
        answer.num_earlier_here = sum(
            other.lifecycle.state is RequestState.QUEUED
            and other.request.band is request.band
            and other.queued_at < live.queued_at
            for other in self._dispatcher.live
        )
        try:
            depths = await self._queue.depths()
        except UnavailableError:
            answer.explanation = "it waits for the queue's store, which does not answer"
            return answer
        answer.num_waiting_in_band = sum(depth.num_waiting for depth in depths if depth.band is request.band)
        sessions = [it for it in self._dialer.sessions.values() if it.limits.model == answer.model and it.worker_id]
        rooms = [_room(session, entry.num_tokens_needed) for session in sessions]
        answer.workers.extend(sorted(rooms, key=lambda room: room.worker_id))
        answer.explanation = _waiting_for(rooms, answer.model)
        return answer

    async def DrainWorker(self, request: admin_pb2.DrainWorkerRequest, context: Any) -> admin_pb2.DrainWorkerResponse:
        """Tells a worker that has a session here."""
        session = next((it for it in self._dialer.sessions.values() if it.worker_id == request.worker_id), None)
        if session is None or not request.worker_id:
            raise NotFoundError(f"worker_id: this gateway has no session with {request.worker_id!r}")
        session.drain_worker()
        return admin_pb2.DrainWorkerResponse(running=session.usage.running if session.usage is not None else 0)

    async def DrainGateway(
        self, request: admin_pb2.DrainGatewayRequest, context: Any
    ) -> admin_pb2.DrainGatewayResponse:
        """Begins this gateway's drain."""
        self._begin_drain()
        return admin_pb2.DrainGatewayResponse(gateway_id=self._settings.gateway_id, num_live=len(self._dispatcher.live))


def _announced(record: WorkerRecord) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        worker_id=record.worker_id,
        epoch=record.epoch,
        address=record.address,
        model=record.model,
        state=_NO_SESSION,
        announced=True,
    )


def _connected(address: str, session: GrpcWorkerSession, *, is_announced: bool) -> admin_pb2.WorkerStatus:
    limits = session.limits
    status = admin_pb2.WorkerStatus(
        worker_id=session.worker_id,
        epoch=session.epoch,
        address=address,
        model=limits.model,
        state=session.state.value,
        announced=is_announced,
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
    )
    usage = session.usage
    if usage is not None:
        status.has_report = True
        status.free_slots = usage.free_slots
        status.free_blocks = usage.free_blocks
        status.referenced_blocks = usage.referenced
        status.cached_blocks = usage.cached
        status.swapping_blocks = usage.swapping
        status.running = usage.running
        status.waiting = usage.waiting
    return status


def _room(session: GrpcWorkerSession, num_tokens_needed: int) -> admin_pb2.WorkerRoom:
    limits, usage = session.limits, session.usage
    needed = min(-(-num_tokens_needed // limits.block_size), limits.num_blocks)
    return admin_pb2.WorkerRoom(
        worker_id=session.worker_id,
        free_slots=usage.free_slots if usage is not None else 0,
        free_blocks=usage.free_blocks if usage is not None else 0,
        blocks_needed=needed,
        obstacle=_obstacle(session.state, limits, usage, needed),
    )


def _obstacle(state: WorkerState, limits: ModelLimits, usage: BlockUsage | None, needed: int) -> str:
    if state is not WorkerState.READY:
        return str(state.value)
    if usage is None:
        return "has told no numbers yet"
    if usage.free_slots <= 0:
        return f"no slot is free: {limits.max_num_seqs} requests at most"
    if usage.free_blocks < needed:
        return f"needs {needed} blocks, {usage.free_blocks} are free"
    return ""


def _waiting_for(rooms: list[admin_pb2.WorkerRoom], model: str) -> str:
    if not rooms:
        return f"it waits for a worker: this gateway has no session with one that serves {model}"
    if all(room.obstacle for room in rooms):
        return "it waits for room: " + "; ".join(f"{room.worker_id}: {room.obstacle}" for room in rooms)
    names = ", ".join(room.worker_id for room in rooms if not room.obstacle)
    return f"it waits for its turn: by the last reports {names} has room, which those ahead of it may be given first"
