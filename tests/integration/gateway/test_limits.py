"""A tenant's limits at the wire: one for all gateways, given back at every end, and a refusal says when to return."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from common.types import Band
from gateway.admission.limits import TenantLimits
from gateway.tenants import Tenant
from protos.inference.v1 import inference_pb2
from tests.integration.gateway.rig import (
    Answer,
    Rig,
    detail_of,
    eventually,
    find_detail,
    generate_request,
    read,
    reason_of,
)
from tests.support.scripted_worker import ScriptedWorker


def acme(**limits: Any) -> dict[str, Tenant]:
    return {"key-acme": Tenant("acme", Band.NORMAL, 1, TenantLimits(**limits))}


def remaining(metadata: Any) -> dict[str, str]:
    prefix = "tidegate-remaining-"
    return {key.removeprefix(prefix): value for key, value in metadata if key.startswith(prefix)}


def refusals(answers: list[Answer]) -> list[str]:
    return [reason_of(answer.error) for answer in answers if answer.error is not None]


async def test_of_a_hundred_at_once_through_two_gateways_ten_are_admitted(rig: Rig) -> None:
    worker = await rig.worker()
    clients = []
    for _ in range(2):
        _, client = await rig.serving(worker, tenants_by_key=acme(requests_per_minute=10))
        clients.append(client)
    answers = await asyncio.gather(*(clients[i % 2].ask(sampling={"max_tokens": 2}) for i in range(100)))
    assert refusals(answers) == ["REQUEST_RATE"] * 90
    refused = next(answer.error for answer in answers if answer.error is not None)
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 50 < detail_of(refused, error_details_pb2.RetryInfo).retry_delay.seconds < 90
    (violation,) = detail_of(refused, error_details_pb2.QuotaFailure).violations
    assert violation.subject == "tenant:acme"
    assert "10 requests per minute" in violation.description


async def test_what_is_left_is_told_at_every_end(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    limits = {"requests_per_minute": 4, "tokens_per_minute": 100, "max_concurrent": 2, "max_queue_length": 1}
    _, client = await rig.serving(worker, tenants_by_key=acme(**limits))
    request = generate_request("hello", sampling={"max_tokens": 5})
    running = client.generate(request)
    await worker.wait_for(lambda: len(worker.running) == 1)
    waiting = client.generate(request, timeout=2)  # time enough to be in the queue when the next one comes
    assert (await anext(aiter(waiting))).HasField("accepted")
    refused = (await read(client.generate(request))).error
    late = (await read(waiting)).error
    assert refused is not None
    assert late is not None
    assert (refused.code(), late.code()) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    left = {"requests-per-minute": "2", "tokens-per-minute": "80", "concurrent": "0"}
    assert remaining(refused.trailing_metadata()) == left
    for _ in range(5):
        await worker.step()
    assert (await read(running)).error is None
    assert remaining(await running.trailing_metadata()) == {
        "requests-per-minute": "3",
        "tokens-per-minute": "90",
        "concurrent": "1",
    }


async def test_tokens_that_were_not_made_are_given_back(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker, tenants_by_key=acme(tokens_per_minute=100))
    for _ in range(3):
        call = client.generate(generate_request("hello", sampling={"max_tokens": 2, "ignore_eos": True}))
        answer = await read(call)
        assert answer.error is None
        metadata = dict(await call.trailing_metadata())
    assert metadata["tidegate-remaining-tokens-per-minute"] == str(100 - 3 * 7), "5 of the prompt, 2 of the answer"
    long = await client.ask("hello", sampling={"max_tokens": 80})
    assert refusals([long]) == ["TOKEN_RATE"]


async def test_a_cancelled_request_pays_for_what_was_made(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker, tenants_by_key=acme(tokens_per_minute=1000))
    call = client.generate(generate_request("hello", sampling={"max_tokens": 900}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    for _ in range(3):
        await worker.step()
    await eventually(lambda: [len(live.output_token_ids) for live in app.dispatcher.live] == [3])
    call.cancel()
    await eventually(lambda: not app.dispatcher.live)
    call = client.generate(generate_request("hello", sampling={"max_tokens": 1}))
    last = asyncio.create_task(read(call))
    await worker.wait_for(lambda: len(worker.running) == 1)
    await worker.step()
    assert (await last).error is None
    left = dict(await call.trailing_metadata())["tidegate-remaining-tokens-per-minute"]
    assert left == str(1000 - (5 + 3) - (5 + 1))


@pytest.mark.parametrize("end", ["cancel", "disconnect", "deadline"])
async def test_a_slot_comes_back_from_the_queue_and_nothing_is_paid(rig: Rig, end: str) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    _, client = await rig.serving(worker)
    busy = asyncio.create_task(client.ask("busy", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    limited = await rig.gateway(
        worker, tenants_by_key={"key-bolt": Tenant("bolt", Band.NORMAL, 1, TenantLimits(max_concurrent=1))}
    )
    bolt = await rig.client(limited, "key-bolt")
    await bolt.wait_serving()
    timeout_s = 2 if end == "deadline" else 60
    call = bolt.generate(generate_request(request_id="b1"), timeout=timeout_s)
    assert (await anext(aiter(call))).accepted.request_id == "b1"
    assert refusals([await bolt.ask(request_id="b2")]) == ["CONCURRENCY"]
    if end == "cancel":
        await bolt.call("Cancel", inference_pb2.CancelRequest(request_id="b1"))
    if end == "disconnect":
        call.cancel()
    else:
        await read(call)
    await eventually(lambda: not limited.dispatcher.live)
    await worker.step()
    assert (await busy).error is None
    third = asyncio.create_task(bolt.ask(request_id="b3", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    await worker.step()
    assert (await third).error is None


async def test_a_spent_day_is_not_told_to_come_back(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker, tenants_by_key=acme(tokens_per_day=8))
    assert (await client.ask("hello", sampling={"max_tokens": 3, "ignore_eos": True})).error is None
    answer = await client.ask("hello", sampling={"max_tokens": 1})
    assert refusals([answer]) == ["DAILY_BUDGET"]
    assert find_detail(answer.error, error_details_pb2.RetryInfo) is None


async def test_output_and_context_are_cut_to_the_tenants(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker, tenants_by_key=acme(max_output=4, max_context=12))
    answer = await client.ask("hello", sampling={"max_tokens": 50, "ignore_eos": True})
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == 4
    answer = await client.ask("hello world!", sampling={"max_tokens": 1})
    assert refusals([answer]) == ["PROMPT_TOO_LONG"]


async def test_a_tenants_part_of_the_queue_is_bounded(rig: Rig) -> None:
    worker: ScriptedWorker = await rig.worker(max_num_seqs=1, step_s=None)
    _, client = await rig.serving(worker, tenants_by_key=acme(max_queue_length=2, requests_per_minute=5))
    calls = [asyncio.create_task(client.ask(request_id="r0", sampling={"max_tokens": 1}))]
    await worker.wait_for(lambda: len(worker.running) == 1)
    for i in (1, 2):
        call = client.generate(generate_request(request_id=f"r{i}", sampling={"max_tokens": 1}))
        await anext(aiter(call))
        calls.append(asyncio.create_task(read(call)))
    assert refusals([await client.ask(request_id="r3")]) == ["QUEUE_FULL"]
    for call in calls:
        await worker.wait_for(lambda: len(worker.running) == 1)
        await worker.step()
        assert (await call).error is None
