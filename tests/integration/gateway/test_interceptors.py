"""What surrounds a handler, over a real connection: decoding, errors, cancellation, identity."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.clock import SystemClock
from common.errors import LimitExceededError, UnauthenticatedError
from common.rpc.interceptors import IDENTITY
from common.rpc.server import ListenError, RpcServer, ServerOptions
from protos.inference.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.integration.gateway.rig import reason_of

SIZE = 1 << 20


class Inference(inference_pb2_grpc.InferenceServicer):
    """Behaves as the request id says."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Any) -> inference_pb2.CancelResponse:
        match request.request_id:
            case "bug":
                raise ValueError("a secret")
            case "cancels itself":
                sleep = asyncio.create_task(asyncio.sleep(10))
                sleep.cancel()
                await sleep
            case "limit":
                raise LimitExceededError("over", retry_after_s=1)
            case "own abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "as the handler says")
            case "who":
                raise LimitExceededError(f"you are {IDENTITY.get()}")
        return inference_pb2.CancelResponse()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse()
            if request.request_id == "fails later":
                raise LimitExceededError("over")
            await asyncio.Event().wait()
        finally:
            self.ended.set()


class Worker(worker_pb2_grpc.WorkerServicer):
    async def Session(
        self, commands: AsyncIterator[worker_pb2.SessionCommand], context: Any
    ) -> AsyncIterator[worker_pb2.SessionEvent]:
        async for _ in commands:
            yield worker_pb2.SessionEvent()


def who(token: str | None) -> str:
    if token is None:
        raise UnauthenticatedError("who?")
    return token


@pytest.fixture
async def server() -> AsyncIterator[tuple[Inference, grpc.aio.Channel]]:
    server = RpcServer(ServerOptions(SIZE, SIZE), SystemClock(), {"inference.v1.Inference": who})
    inference = Inference()
    server.add("inference.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, inference)
    server.add("inference.v1.Worker", worker_pb2_grpc.add_WorkerServicer_to_server, Worker())
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference, channel
    await server.stop(0)


async def fail(channel: grpc.aio.Channel, request_id: str) -> grpc.aio.AioRpcError:
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.CancelRequest(request_id=request_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Cancel(request, metadata=(("authorization", "bearer Key"),), timeout=60)
    return caught.value


@pytest.mark.parametrize(
    ("request_id", "code"),
    [
        ("bug", grpc.StatusCode.INTERNAL),
        ("cancels itself", grpc.StatusCode.INTERNAL),
        ("limit", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("own abort", grpc.StatusCode.DATA_LOSS),
    ],
)
async def test_every_failure_has_an_answer(
    server: tuple[Inference, grpc.aio.Channel], request_id: str, code: grpc.StatusCode
) -> None:
    error = await fail(server[1], request_id)
    assert error.code() is code
    assert "secret" not in str(error)


async def test_the_handler_knows_who_calls(server: tuple[Inference, grpc.aio.Channel]) -> None:
    assert (await fail(server[1], "who")).details() == "you are Key"


async def test_a_stream_can_fail_after_it_began(server: tuple[Inference, grpc.aio.Channel]) -> None:
    stub = inference_pb2_grpc.InferenceStub(server[1])
    request = inference_pb2.GenerateRequest(request_id="fails later")
    responses = aiter(stub.Generate(request, metadata=(("authorization", "Bearer Key"),)))
    await anext(responses)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(responses)
    assert reason_of(caught.value) == "QUEUE_FULL"


async def test_a_client_that_leaves_closes_the_handlers_stream(server: tuple[Inference, grpc.aio.Channel]) -> None:
    inference, channel = server
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(inference_pb2.GenerateRequest(), metadata=(("authorization", "Bearer Key"),))
    await anext(aiter(call))
    call.cancel()
    await asyncio.wait_for(inference.ended.wait(), 60)


async def test_a_bad_message_in_the_middle_of_a_stream_ends_it(server: tuple[Inference, grpc.aio.Channel]) -> None:
    call: Any = server[1].stream_stream("/inference.v1.Worker/Session")(metadata=())
    await call.write(worker_pb2.SessionCommand(drain=worker_pb2.Drain()).SerializeToString())
    assert await call.read() == b""
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert reason_of(caught.value) == "MALFORMED_MESSAGE"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::]", "localhost"])
@pytest.mark.parametrize("num_listeners", [1, 3])
async def test_a_taken_port_is_named(host: str, num_listeners: int) -> None:
    options = ServerOptions(SIZE, SIZE, num_listeners=num_listeners)
    first, second = RpcServer(options, SystemClock()), RpcServer(options, SystemClock())
    port = await first.start(f"{host}:0")
    with pytest.raises(ListenError, match=re.escape(f"{host}:{port}")):
        await second.start(f"{host}:{port}")
    await first.stop(0)
    await second.stop(0)


async def test_every_listener_of_a_port_serves_and_stops() -> None:
    server = RpcServer(ServerOptions(SIZE, SIZE, num_listeners=3), SystemClock())
    server.add("inference.v1.Inference", inference_pb2_grpc.add_InferenceServicer_to_server, Inference())
    port = await server.start("127.0.0.1:0")
    await server.set_serving(["", "inference.v1.Inference"], is_serving=True)
    for number in range(24):  # a connection each; all with one listener once in a hundred billion runs
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_timeout_ms", 20_000 + number)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="inference.v1.Inference"), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)
    await server.wait()
    again = RpcServer(ServerOptions(SIZE, SIZE, num_listeners=3), SystemClock())
    assert await again.start(f"127.0.0.1:{port}") == port
    await again.stop(0)


async def test_a_socket_in_the_file_system_has_one_listener(tmp_path: Path) -> None:
    server = RpcServer(ServerOptions(SIZE, SIZE, num_listeners=3), SystemClock())
    await server.start(f"unix:{tmp_path}/socket")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/socket") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)
    await server.wait()
