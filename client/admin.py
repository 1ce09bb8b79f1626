"""The operators' client: what a gateway's admin service answers, as messages of the wire."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar

import grpc

from client.client import ClientOptions
from client.errors import from_rpc_error
from protos.inference.v1 import admin_pb2, admin_pb2_grpc

_DEFAULT_OPTIONS = ClientOptions()
_TIMEOUT_S = 10.0
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class AdminClient:
    """A connection to one gateway's admin service; an async context manager. Methods raise ClientError."""

    def __init__(
        self,
        address: str,
        admin_key: str,
        *,
        options: ClientOptions = _DEFAULT_OPTIONS,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = _TIMEOUT_S,
    ) -> None:
        """`address`: host:port. `timeout_s` bounds each call. Raises ValueError if the key cannot be sent."""
        if not (admin_key.isascii() and admin_key.isprintable()) or admin_key != admin_key.strip():
            raise ValueError("the admin key has other characters than printable ASCII, or spaces around it")
        self._metadata = (("authorization", f"Bearer {admin_key}"),) if admin_key else ()
        self._timeout_s = timeout_s
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options.to_grpc())
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options.to_grpc())
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def list_workers(self) -> admin_pb2.ListWorkersResponse:
        """Workers with their numbers, as the gateway sees them."""
        return await self._call(self._stub.ListWorkers, admin_pb2.ListWorkersRequest())

    async def show_queue(self) -> admin_pb2.ShowQueueResponse:
        """Waiting requests of the whole fleet by band and flow."""
        return await self._call(self._stub.ShowQueue, admin_pb2.ShowQueueRequest())

    async def list_tenants(self) -> admin_pb2.ListTenantsResponse:
        """Tenants with their limits and what is left of them, without keys."""
        return await self._call(self._stub.ListTenants, admin_pb2.ListTenantsRequest())

    async def set_tenant(self, request: admin_pb2.SetTenantRequest) -> admin_pb2.SetTenantResponse:
        """Changes or adds a tenant on all gateways; what is not set in the request stays as it is."""
        return await self._call(self._stub.SetTenant, request)

    async def delete_tenant(self, tenant_id: str) -> admin_pb2.DeleteTenantResponse:
        """Shuts a tenant out on all gateways."""
        return await self._call(self._stub.DeleteTenant, admin_pb2.DeleteTenantRequest(tenant_id=tenant_id))

    async def reset_tenant(self, tenant_id: str) -> admin_pb2.ResetTenantResponse:
        """Forgets what was set or deleted: the tenant is as the tenants file says."""
        return await self._call(self._stub.ResetTenant, admin_pb2.ResetTenantRequest(tenant_id=tenant_id))

    async def explain(self, tenant_id: str, request_id: str) -> admin_pb2.ExplainRequestResponse:
        """Why a request waits, where it runs, or why it was refused."""
        request = admin_pb2.ExplainRequestRequest(tenant_id=tenant_id, request_id=request_id)
        return await self._call(self._stub.ExplainRequest, request)

    async def list_refusals(self, tenant_id: str, max_count: int = 0) -> admin_pb2.ListRefusalsResponse:
        """The last requests of a tenant that the gateway has refused, latest first; 0: at most 100."""
        request = admin_pb2.ListRefusalsRequest(tenant_id=tenant_id, max_count=max_count)
        return await self._call(self._stub.ListRefusals, request)

    async def drain_worker(self, worker_id: str) -> admin_pb2.DrainWorkerResponse:
        """Lets a worker finish what it runs, hand back the rest, and end."""
        return await self._call(self._stub.DrainWorker, admin_pb2.DrainWorkerRequest(worker_id=worker_id))

    async def drain_gateway(self) -> admin_pb2.DrainGatewayResponse:
        """Lets the gateway finish what it streams, and end."""
        return await self._call(self._stub.DrainGateway, admin_pb2.DrainGatewayRequest())

    async def _call(self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer], request: _Request) -> _Answer:
        try:
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
