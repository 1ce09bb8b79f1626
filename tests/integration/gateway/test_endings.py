"""Every way a request can end before its time: once each, with nothing left behind."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import redis
from google.rpc import error_details_pb2

from gateway.app import GatewayApp
from protos.inference.v1 import inference_pb2, types_pb2
from tests.integration.gateway.rig import Client, Rig, detail_of, eventually, generate_request, has_got, read, reason_of
from tests.support.scripted_worker import ScriptedWorker, text_of

LONG = {"max_tokens": 2000}


async def idle(app: GatewayApp, worker: ScriptedWorker | None = None) -> None:
    """Until the gateway holds nothing and the worker runs nothing."""
    async with asyncio.timeout(60):
        await app.dispatcher.wait_idle()
    if worker is not None:
        await worker.wait_for(lambda: not worker.running)


async def cancel(client: Client, request_id: str) -> None:
    await client.call("Cancel", inference_pb2.CancelRequest(request_id=request_id))


async def test_cancel_while_streaming_ends_the_stream_normally(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    answer = asyncio.create_task(client.ask(request_id="r1", sampling=LONG))
    await has_got(app, 2)
    await cancel(client, "r1")
    ended = await answer
    assert ended.error is None
    assert ended.finished is not None
    assert ended.finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert 3 <= ended.finished.usage.completion_tokens < 2000
    assert ended.text == text_of(b"hello", ended.finished.usage.completion_tokens)
    await idle(app, worker)
    assert len(worker.aborted) == 1


async def test_cancel_while_queued(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, client = await rig.serving(worker)
    first = asyncio.create_task(client.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    queued = client.generate(generate_request(request_id="r2"))
    assert (await anext(aiter(queued))).accepted.request_id == "r2"
    await cancel(client, "r2")
    ended = await read(queued)
    assert ended.finished is not None
    assert ended.finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert ended.finished.usage == types_pb2.Usage(prompt_tokens=5)
    await worker.step()
    assert (await first).error is None
    await idle(app)
    assert len(worker.submitted) == 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_cancel_of_what_is_not_live(rig: Rig, when: str) -> None:
    _, client = await rig.serving(await rig.worker())
    if when == "after":
        assert (await client.ask(request_id="r1")).error is None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cancel(client, "r1")
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cancel(client, "")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_nobody_cancels_another_tenants_request(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    other = await rig.client(app, "key-paid")
    answer = asyncio.create_task(client.ask(request_id="r1", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cancel(other, "r1")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await worker.step()
    assert (await answer).error is None


async def test_cancel_at_any_gateway_reaches_the_stream(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    _, other = await rig.serving(worker)
    answer = asyncio.create_task(client.ask(request_id="r1", sampling=LONG))
    await worker.wait_for(lambda: any(it.num_emitted for it in worker.running))
    await cancel(other, "r1")
    ended = await answer
    assert ended.finished is not None
    assert ended.finished.reason == types_pb2.FINISH_REASON_CANCELLED
    await idle(app, worker)


async def test_a_client_that_leaves_stops_its_worker(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    call = client.generate(generate_request(sampling=LONG))
    responses = aiter(call)
    for _ in range(3):
        await anext(responses)
    call.cancel()
    await idle(app, worker)
    assert len(worker.aborted) == 1


async def test_a_connection_that_breaks_stops_the_worker(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    doomed = Client(app.port)
    call = doomed.generate(generate_request(sampling=LONG))
    await anext(aiter(call))
    await doomed.channel.close()
    await idle(app, worker)
    assert (await client.ask()).error is None


async def test_a_client_that_leaves_the_queue_is_never_dispatched(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, client = await rig.serving(worker)
    first = asyncio.create_task(client.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    calls = [client.generate(generate_request("gone")) for _ in range(20)]
    for call in calls:
        await anext(aiter(call))
    for call in calls:
        call.cancel()
    await eventually(lambda: len(app.dispatcher.live) == 1)
    await worker.step()
    assert (await first).error is None
    await idle(app)
    assert [depth.num_waiting for depth in await app.queue.depths()] == [0, 0, 0]
    assert len(worker.submitted) == 1


async def test_leaving_around_the_moment_of_dispatch_leaks_nothing(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=2, num_blocks=64)
    app, client = await rig.serving(worker)

    async def come_and_go(number: int) -> None:
        call = client.generate(generate_request("come and go", sampling={"max_tokens": 40}))
        await asyncio.sleep(number % 40 / 1000)
        call.cancel()

    for start in range(0, 400, 40):
        await asyncio.gather(*(come_and_go(start + index) for index in range(40)))
    await idle(app, worker)
    assert (await client.ask()).error is None
    assert [depth.num_waiting for depth in await app.queue.depths()] == [0, 0, 0]


async def test_a_live_id_is_refused_and_free_again_after_the_end(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    _, elsewhere = await rig.serving(worker)
    first = asyncio.create_task(client.ask(request_id="r1", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    for other in (client, elsewhere):
        answer = await other.ask(request_id="r1")
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert reason_of(answer.error) == "DUPLICATE_REQUEST_ID"
    await worker.step()
    assert (await first).error is None
    for other in (elsewhere, client):
        again = asyncio.create_task(other.ask(request_id="r1", sampling={"max_tokens": 1}))
        await worker.wait_for(lambda: len(worker.running) == 1)
        await worker.step()
        assert (await again).error is None
    await idle(app)


async def test_an_id_can_be_used_again_right_after_leaving(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.001)
    app, client = await rig.serving(worker)
    for number in range(20):
        call = client.generate(generate_request(f"old {number}", request_id="same", sampling=LONG))
        responses = aiter(call)
        for _ in range(2 + number % 3):
            await anext(responses)
        call.cancel()
        text = f"new {number}"
        async with asyncio.timeout(60):
            while True:  # until the gateway has noticed that the first one left
                answer = await client.ask(text, request_id="same", sampling={"max_tokens": 5})
                if answer.error is None:
                    break
                assert reason_of(answer.error) == "DUPLICATE_REQUEST_ID"
        assert answer.text == text_of(text.encode(), 5)
    await idle(app, worker)


async def test_the_clients_deadline_passes_while_streaming(rig: Rig) -> None:
    worker = await rig.worker(context_length=200_000, num_blocks=20_000)
    app, client = await rig.serving(worker)
    for timeout_s in (0.5, 5.0, 50.0):  # as much as it takes to be streaming by then
        answer = await client.ask(sampling={"max_tokens": 190_000}, timeout=timeout_s)
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if answer.deltas:
            break
    assert answer.deltas
    await idle(app, worker)
    assert len(worker.aborted) == len(worker.submitted) >= 1


async def test_the_clients_deadline_passes_in_the_queue(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, client = await rig.serving(worker)
    first = asyncio.create_task(client.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    answer = await client.ask("second", timeout=0.3)
    assert answer.error is not None
    assert answer.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: len(app.dispatcher.live) == 1)
    await worker.step()
    assert (await first).error is None
    await idle(app)
    assert len(worker.submitted) == 1


async def test_the_servers_queue_limit_is_not_the_clients_deadline(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, client = await rig.serving(worker, queue_ttl_s=0.3)
    _, patient = await rig.serving(worker)
    first = asyncio.create_task(patient.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    answer = await client.ask("second")
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_TTL")
    assert detail_of(answer.error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    await worker.step()
    assert (await first).error is None
    await idle(app)


async def test_a_full_queue_refuses(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, client = await rig.serving(worker, max_queue_length=1)
    first = asyncio.create_task(client.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    queued = client.generate(generate_request("second", sampling={"max_tokens": 1}))
    await anext(aiter(queued))
    answer = await client.ask("third")
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert detail_of(answer.error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    queued.cancel()
    await worker.step()
    assert (await first).error is None
    await idle(app)


async def test_without_any_worker_nothing_is_promised(rig: Rig) -> None:
    app = await rig.gateway()
    client = await rig.client(app)
    answer = await client.ask()
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")


async def test_workers_that_left_are_waited_for_then_it_is_said(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker, no_worker_timeout_s=0.5)
    await worker.kill()
    await eventually(lambda: not app.fleet.is_ready)
    answer = await client.ask()
    assert answer.accepted is not None
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
    await idle(app)


async def test_a_worker_that_can_never_serve_it_ends_the_request(rig: Rig) -> None:
    worker = await rig.worker(reject=types_pb2.REASON_NEVER_FITS)
    app, client = await rig.serving(worker)
    answer = await client.ask()
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.INVALID_ARGUMENT, "NEVER_FITS")
    assert answer.error.details() == "as told"
    await idle(app)


async def test_no_key_is_left_in_the_store(rig: Rig, redis_client: redis.Redis, pool: str) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    assert (await client.ask()).error is None
    await rig.stop(app, 1.0)
    left = sorted(redis_client.scan_iter(match=f"tidegate:{{{pool}}}:*"))
    assert [key for key in left if app.gateway_id in key] == []
