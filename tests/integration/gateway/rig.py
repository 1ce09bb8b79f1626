"""What the gateway's integration tests share: a fleet in one process, and a client that looks at the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from common.types import Band
from gateway.app import GatewayApp
from gateway.config import GatewaySettings
from gateway.tenants import Tenant, Tenants, hash_key
from protos.inference.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    types_pb2,
)
from tests.support.scripted_worker import ScriptedWorker

KEYS = {
    "key-acme": Tenant("acme", Band.NORMAL),
    "key-paid": Tenant("paid", Band.HIGH),
    "key-batch": Tenant("batch", Band.LOW),
}
FLEET_KEY = "fleet-secret"


def generate_request(text: str = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    """A request for a few tokens; `sampling` may be a mapping."""
    sampling = fields.pop("sampling", {})
    if isinstance(sampling, Mapping):
        sampling = types_pb2.SamplingParams(**{"max_tokens": 8, **sampling})
    if not {"chat", "tokens", "text"} & fields.keys():
        fields["text"] = text
    return inference_pb2.GenerateRequest(sampling=sampling, **fields)


@dataclass
class Answer:
    """A stream, read to its end."""

    accepted: inference_pb2.Accepted | None = None
    deltas: list[inference_pb2.Delta] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


async def read(call: Any, answer: Answer | None = None) -> Answer:
    """Reads a stream to its end, whichever it is; goes on with an answer that has begun."""
    answer = answer or Answer()
    try:
        async for response in call:
            take(answer, response)
    except grpc.aio.AioRpcError as error:
        answer.error = error
    finally:
        call.cancel()
    return answer


def take(answer: Answer, response: inference_pb2.GenerateResponse) -> None:
    assert answer.finished is None, "nothing follows Finished"
    match response.WhichOneof("event"):
        case "accepted":
            assert answer.accepted is None
            answer.accepted = response.accepted
        case "delta":
            answer.deltas.append(response.delta)
        case "finished":
            answer.finished = response.finished
        case other:
            raise AssertionError(other)


class Client:
    """One tenant's connection to one gateway."""

    def __init__(self, port: int, key: str | None = "key-acme", options: Sequence[tuple[str, int]] = ()) -> None:
        own = ("grpc.use_local_subchannel_pool", 1)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[own, *options])
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.jobs = jobs_pb2_grpc.JobsStub(self.channel)
        self.metadata = () if key is None else (("authorization", f"Bearer {key}"),)

    def generate(self, request: inference_pb2.GenerateRequest | None = None, **kwargs: Any) -> Any:
        return self.stub.Generate(request or generate_request(), metadata=self.metadata, **kwargs)

    async def ask(self, text: str = "hello", *, timeout: float = 60, **fields: Any) -> Answer:
        return await read(self.generate(generate_request(text, **fields), timeout=timeout))

    async def cancel(self, request_id: str) -> None:
        """Cancels a live request, if it still is one."""
        try:
            await self.call("Cancel", inference_pb2.CancelRequest(request_id=request_id))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    async def call(self, method: str, request: Any, **kwargs: Any) -> Any:
        return await getattr(self.stub, method)(request, metadata=self.metadata, **{"timeout": 60, **kwargs})

    async def job(self, method: str, **fields: Any) -> jobs_pb2.Job:
        """What Submit, Get or Cancel answers."""
        kinds = {
            "Submit": jobs_pb2.SubmitJobRequest,
            "Get": jobs_pb2.GetJobRequest,
            "Cancel": jobs_pb2.CancelJobRequest,
        }
        answer = await getattr(self.jobs, method)(kinds[method](**fields), metadata=self.metadata, timeout=60)
        return answer.job  # type: ignore[no-any-return]

    async def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status  # type: ignore[no-any-return]

    async def wait_serving(self) -> None:
        """Until the gateway says SERVING."""
        await until_health(self, "", health_pb2.HealthCheckResponse.SERVING)


def reason_of(error: grpc.aio.AioRpcError | None) -> str:
    """ErrorInfo.reason of an error."""
    return str(detail_of(error, error_details_pb2.ErrorInfo).reason)


def detail_of(error: grpc.aio.AioRpcError | None, kind: Any) -> Any:
    """The rich detail of that type; fails if there is none."""
    found = find_detail(error, kind)
    assert found is not None, f"{error} has no {kind.__name__}"
    return found


def find_detail(error: grpc.aio.AioRpcError | None, kind: Any) -> Any:
    """The rich detail of that type, or None."""
    assert error is not None, "no error"
    status: status_pb2.Status | None = rpc_status.from_call(error)
    assert status is not None, f"{error} has no rich status"
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            return message
    return None


class Rig:
    """A fleet on one Redis pool. Everything started here is stopped at the end, gateways first."""

    def __init__(self, redis_url: str, pool: str) -> None:
        self._redis_url = redis_url
        self._pool = pool
        self._stack = AsyncExitStack()
        self.gateways: list[GatewayApp] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def worker(self, **fields: Any) -> ScriptedWorker:
        worker = await ScriptedWorker(**fields).start()
        self._stack.push_async_callback(worker.kill)
        return worker

    async def gateway(
        self,
        *workers: ScriptedWorker,
        redis_url: str = "",
        tenants_by_key: Mapping[str, Tenant] = KEYS,
        **settings: Any,
    ) -> GatewayApp:
        """A gateway that dials these workers, on the rig's Redis or another."""
        values = {
            "listen": "127.0.0.1:0",
            "metrics_listen": "",
            "pool": self._pool,
            "fleet_key": FLEET_KEY,
            "workers": ",".join(worker.address for worker in workers),
            "worker_poll_s": 0.1,
            "heartbeat_s": 0.2,
            "drain_s": 0.5,
            # A busy machine is no lost store, and no lost worker.
            "store_timeout_s": 20.0,
            "store_patience_s": 10.0,
            "worker_silence_s": 20.0,
            **settings,
        }
        tenants = Tenants({hash_key(key): tenant for key, tenant in tenants_by_key.items()})
        app = GatewayApp(GatewaySettings.model_validate(values), tenants, redis_url or self._redis_url)
        await app.start()
        self.gateways.append(app)
        self._stack.push_async_callback(self._stop, app)
        return app

    async def _stop(self, app: GatewayApp) -> None:
        if app in self.gateways:
            self.gateways.remove(app)
            await app.stop()

    async def stop(self, app: GatewayApp, drain_s: float) -> None:
        """Drains one gateway now."""
        self.gateways.remove(app)
        await app.stop(drain_s)

    async def client(self, app: GatewayApp, key: str | None = "key-acme", **kwargs: Any) -> Client:
        client = Client(app.port, key, **kwargs)
        self._stack.push_async_callback(client.channel.close)
        return client

    async def serving(self, *workers: ScriptedWorker, **settings: Any) -> tuple[GatewayApp, Client]:
        """A gateway that is SERVING, and a client of it."""
        app = await self.gateway(*workers, **settings)
        client = await self.client(app)
        await client.wait_serving()
        return app, client


async def has_got(app: GatewayApp, num_tokens: int, num_requests: int = 1) -> None:
    """Until the gateway has more than so many tokens of each request: what a worker has sent may be on its way."""

    def is_so() -> bool:
        live = app.dispatcher.live
        return len(live) == num_requests and all(len(it.output_token_ids) > num_tokens for it in live)

    await eventually(is_so)


async def announce(app: GatewayApp, worker: ScriptedWorker, key: str | None = FLEET_KEY, **changes: Any) -> float:
    """What a worker does; returns the ttl in seconds."""
    fields = {"worker_id": worker.worker_id, "epoch": worker.epoch, "address": worker.address, "model": worker.model}
    request = fleet_pb2.AnnounceRequest(**{**fields, **changes})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        response = await fleet_pb2_grpc.FleetStub(channel).Announce(request, metadata=metadata, timeout=60)
    return float(response.ttl_s)


async def until_health(client: Client, service: str, status: int, timeout_s: float = 60) -> None:
    """Until a service's health is `status`."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    async for response in watch:
        if response.status == status:
            watch.cancel()
            return


async def eventually(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Waits until a condition holds which nobody announces; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.01)
