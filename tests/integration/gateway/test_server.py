"""The server around the calls: health, reflection, keepalive, draining, metrics, the store's absence."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any, Self

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.local_redis import LocalRedis
from protos.inference.v1 import inference_pb2_grpc
from tests.integration.gateway.rig import (
    Client,
    Rig,
    announce,
    eventually,
    generate_request,
    read,
    reason_of,
    until_health,
)
from tests.support.scripted_worker import text_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE, FLEET = "inference.v1.Inference", "inference.v1.Fleet"


async def test_health_follows_the_fleet_and_the_drain(rig: Rig) -> None:
    app = await rig.gateway()
    client = await rig.client(app)
    watch = aiter(health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE)))
    assert (await anext(watch)).status == NOT_SERVING
    await until_health(client, FLEET, SERVING)  # workers must be able to announce before any is ready
    assert await client.health("") == NOT_SERVING
    worker = await rig.worker()
    await announce(app, worker)
    assert (await anext(watch)).status == SERVING
    assert await client.health("") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.health("no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    stopping = asyncio.create_task(rig.stop(app, 0.2))
    assert (await anext(watch)).status == NOT_SERVING
    await stopping


async def test_reflection_lists_the_services(rig: Rig) -> None:
    client = await rig.client(await rig.gateway())
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    response = await anext(aiter(call))
    names = {service.name for service in response.list_services_response.service}
    assert names == {
        INFERENCE,
        FLEET,
        "inference.v1.Admin",
        "inference.v1.Jobs",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE)]))
    response = await anext(aiter(call))
    assert response.file_descriptor_response.file_descriptor_proto


# More often than a client may by the library's own rules, which are a ping in five minutes and two strikes.
PINGS = [
    ("grpc.keepalive_time_ms", 300),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


async def test_a_silent_stream_survives_its_clients_pings(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, _ = await rig.serving(worker)
    client = await rig.client(app, options=PINGS)
    answer = asyncio.create_task(client.ask(sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    async with _StrictServer() as strict:
        # The same silence and the same pings: what a server without our settings does to them.
        other = Client(strict.port, options=PINGS)
        refused = await other.ask()
        assert refused.error is not None
        assert refused.error.details() == "Too many pings"
        await other.channel.close()
    await worker.step()
    assert (await answer).error is None


class _StrictServer(inference_pb2_grpc.InferenceServicer):
    """Never answers."""

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        await context.send_initial_metadata(())
        await asyncio.Event().wait()


async def test_draining_refuses_new_requests_and_lets_live_ones_end(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    answer = asyncio.create_task(client.ask(sampling={"max_tokens": 5}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    await worker.step()
    stopping = asyncio.create_task(rig.stop(app, 20.0))
    await until_health(client, "", NOT_SERVING)
    refused = await client.ask("late")
    assert refused.error is not None
    assert (refused.error.code(), reason_of(refused.error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    for _ in range(4):
        await worker.step()
    ended = await answer
    assert ended.error is None
    assert ended.text == text_of(b"hello", 5)
    await stopping


async def test_what_outlives_the_drain_is_ended_and_aborted(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, client = await rig.serving(worker)
    answers = [asyncio.create_task(client.ask(f"ask {n}")) for n in range(3)]
    await worker.wait_for(lambda: len(worker.running) == 1)
    await eventually(lambda: len(app.dispatcher.live) == 3)
    await rig.stop(app, 0.2)
    for answer in answers:
        error = (await answer).error
        assert error is not None
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    await worker.wait_for(lambda: not worker.sessions)


async def test_metrics_are_served_over_http(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker, metrics_listen="127.0.0.1:0")
    answer = asyncio.create_task(client.ask(sampling={"max_tokens": 8}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    for _ in range(8):
        await worker.step()
    assert (await answer).error is None
    assert (await client.ask(model="none")).error is not None
    url = f"http://127.0.0.1:{app.metrics_port}/metrics"
    page = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())).decode()
    assert 'tidegate_gateway_requests_total{band="normal",outcome="completed"} 1.0' in page
    assert 'tidegate_gateway_completion_tokens_total{band="normal"} 8.0' in page
    assert 'tidegate_gateway_rejected_total{reason="UNKNOWN_MODEL"} 1.0' in page
    assert 'tidegate_gateway_ttft_seconds_count{band="normal"} 1.0' in page
    assert 'tidegate_gateway_tpot_seconds_count{band="normal"} 1.0' in page
    assert 'tidegate_gateway_itl_seconds_count{band="normal"} 7.0' in page
    assert 'tidegate_gateway_queue_wait_seconds_count{band="normal"} 1.0' in page
    assert 'tidegate_gateway_worker_blocks{state="empty",worker="w1"}' in page
    assert "tidegate_gateway_store_up 1.0" in page
    assert "acme" not in page


async def test_an_absent_store_is_said_and_survived(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    redis = LocalRedis()
    redis.start()
    try:
        _, client = await rig.serving(worker, redis_url=redis.url, store_wait_s=0.5)
        call = client.generate(generate_request(sampling={"max_tokens": 3}), timeout=30)
        assert (await anext(aiter(call))).HasField("accepted")
        streaming = asyncio.create_task(read(call))
        await worker.wait_for(lambda: len(worker.running) == 1)
        redis.stop()
        await until_health(client, "", NOT_SERVING)
        refused = await client.ask("late")
        assert refused.error is not None
        assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(refused.error) == "STORE_UNAVAILABLE"
        for _ in range(3):
            await worker.step()
        ended = await streaming
        assert ended.text == text_of(b"hello", 3)
    finally:
        redis.stop()


async def test_a_crashed_loop_is_said_and_nobody_waits_for_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await rig.worker(step_s=None, max_num_seqs=1)
    app, client = await rig.serving(worker)
    streaming = asyncio.create_task(client.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    waiting = asyncio.create_task(client.ask("second"))
    await eventually(lambda: len(app.dispatcher.live) == 2)

    async def crash(*_: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(app.queue, "dispatch", crash)
    app.dispatcher.kick()
    await until_health(client, "", NOT_SERVING)
    for answer in (await waiting, await client.ask("third")):
        assert answer.error is not None
        assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.UNAVAILABLE, "INTERNAL")
    await worker.step()
    assert (await streaming).error is None


async def test_errors_of_the_code_tell_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = await rig.serving(await rig.worker())

    def explode(*_: object) -> None:
        raise RuntimeError("secret prompt")

    monkeypatch.setattr("gateway.rpc.inference_service.decode_generate", explode)
    answer = await client.ask()
    assert answer.error is not None
    assert answer.error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(answer.error)


async def test_unknown_methods_are_unimplemented(rig: Rig) -> None:
    _, client = await rig.serving(await rig.worker())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.channel.unary_unary("/inference.v1.Inference/Nothing")(b"", metadata=client.metadata)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
