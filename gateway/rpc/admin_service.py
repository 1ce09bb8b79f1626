"""What operators call: the fleet as this gateway sees it, why a request waits, edits of tenants, drains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common.errors import InvalidRequestError, NotFoundError
from common.types import Band
from gateway.admission.limiter import Limiter
from gateway.dispatcher import Dispatcher
from gateway.live import fleet_request_id
from gateway.queueing.queue import Queue, WorkerRecord
from gateway.rpc.dialer import WorkerDialer
from gateway.rpc.explanation import Explainer
from gateway.rpc.worker_session import GrpcWorkerSession
from gateway.tenant_edits import TenantEdits
from gateway.tenants import Tenant, Tenants
from protos.inference.v1 import admin_pb2, admin_pb2_grpc, types_pb2

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
register = admin_pb2_grpc.add_AdminServicer_to_server

_NO_SESSION = "no session"
_NUM_REFUSALS = 100
_BANDS = {int(band): band.name.lower() for band in Band}


class AdminService(admin_pb2_grpc.AdminServicer):
    """Reads what others own; changes tenants and begins drains. Must stand behind the admin key's authenticator."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        dialer: WorkerDialer,
        queue: Queue,
        limiter: Limiter,
        tenants: Tenants,
        edits: TenantEdits,
        explainer: Explainer,
        gateway_id: str,
        *,
        begin_drain: Callable[[], None],
    ) -> None:
        """`begin_drain` makes the program stop as a signal would."""
        self._dispatcher = dispatcher
        self._dialer = dialer
        self._queue = queue
        self._limiter = limiter
        self._tenants = tenants
        self._edits = edits
        self._explainer = explainer
        self._gateway_id = gateway_id
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
        return admin_pb2.ListWorkersResponse(gateway_id=self._gateway_id, workers=workers)

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
        flows = [
            admin_pb2.FlowDepth(
                tenant_id=depth.flow.tenant,
                band=types_pb2.Band.ValueType(depth.flow.band),
                model=depth.flow.model,
                num_waiting=depth.num_waiting,
                oldest_wait_s=depth.oldest_wait_s,
                served=depth.served,
                weight=depth.weight,
            )
            for depth in await self._queue.flow_depths()
        ]
        return admin_pb2.ShowQueueResponse(bands=bands, flows=flows)

    async def ListTenants(self, request: admin_pb2.ListTenantsRequest, context: Any) -> admin_pb2.ListTenantsResponse:
        """Tenants with their limits and what is left of them."""
        return admin_pb2.ListTenantsResponse(tenants=await self._statuses(self._tenants.all))

    async def _statuses(self, tenants: Sequence[Tenant]) -> list[admin_pb2.TenantStatus]:
        num_live = Counter(live.request.tenant.tenant_id for live in self._dispatcher.live)
        remaining = await self._limiter.remaining({tenant.tenant_id: tenant.limits for tenant in tenants})
        return [
            admin_pb2.TenantStatus(
                tenant_id=tenant.tenant_id,
                max_band=types_pb2.Band.ValueType(tenant.band),
                weight=tenant.weight,
                limits=tenant.limits.described(),
                num_live=num_live[tenant.tenant_id],
                remaining={name: str(number) for name, number in left.by_name().items()},
                source="set" if self._tenants.is_edited(tenant.tenant_id) else "file",
            )
            for tenant, left in zip(tenants, remaining, strict=True)
        ]

    async def SetTenant(self, request: admin_pb2.SetTenantRequest, context: Any) -> admin_pb2.SetTenantResponse:
        """Changes or adds a tenant on all gateways."""
        band = "" if request.max_band == types_pb2.BAND_UNSPECIFIED else _BANDS.get(request.max_band, "unknown")
        tenant = await self._edits.set(
            request.tenant_id, band, request.weight, request.limits, list(request.key_sha256), by=context.peer()
        )
        (status,) = await self._statuses([tenant])
        return admin_pb2.SetTenantResponse(tenant=status)

    async def DeleteTenant(
        self, request: admin_pb2.DeleteTenantRequest, context: Any
    ) -> admin_pb2.DeleteTenantResponse:
        """Shuts a tenant out on all gateways."""
        await self._edits.delete(request.tenant_id, by=context.peer())
        return admin_pb2.DeleteTenantResponse()

    async def ResetTenant(self, request: admin_pb2.ResetTenantRequest, context: Any) -> admin_pb2.ResetTenantResponse:
        """Lets the tenants file say again what a tenant is."""
        await self._edits.reset(request.tenant_id, by=context.peer())
        return admin_pb2.ResetTenantResponse()

    async def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: Any
    ) -> admin_pb2.ExplainRequestResponse:
        """What is known of a request here, or which gateway knows more."""
        if not request.tenant_id or not request.request_id:
            raise InvalidRequestError.of_field("request_id", "and tenant_id are both needed")
        return await self._explainer.explain(fleet_request_id(request.tenant_id, request.request_id))

    async def ListRefusals(
        self, request: admin_pb2.ListRefusalsRequest, context: Any
    ) -> admin_pb2.ListRefusalsResponse:
        """The last requests of a tenant that were refused here."""
        refusals = self._explainer.refusals(request.tenant_id, request.max_count or _NUM_REFUSALS)
        return admin_pb2.ListRefusalsResponse(gateway_id=self._gateway_id, refusals=refusals)

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
        return admin_pb2.DrainGatewayResponse(gateway_id=self._gateway_id, num_live=len(self._dispatcher.live))


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
