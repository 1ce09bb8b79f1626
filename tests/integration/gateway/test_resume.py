"""Streams that break and are gone on with, at the same gateway or another, and requests that are asked twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from gateway import handler
from gateway.live import LiveRequest
from protos.inference.v1 import inference_pb2, types_pb2
from tests.integration.gateway.rig import Answer, Client, Rig, eventually, generate_request, read, reason_of, take
from tests.support.scripted_worker import ScriptedWorker, spell, text_of

NUM_TOKENS = 300
LONG = 2000  # tokens that no worker makes, one a step, while something else is done


def resume(client: Client, offset: int = 0, request_id: str = "mine", **kwargs: Any) -> Any:
    request = inference_pb2.ResumeRequest(request_id=request_id, offset=offset)
    return client.stub.Resume(request, metadata=client.metadata, **{"timeout": 60, **kwargs})


async def resumed(client: Client, offset: int = 0, request_id: str = "mine") -> Answer:
    return await read(resume(client, offset, request_id))


async def begun(client: Client, num_tokens: int, max_tokens: int = NUM_TOKENS, **fields: Any) -> tuple[Any, Answer]:
    """A resumable stream that is read until it has so many tokens, and left open."""
    sampling = {"max_tokens": max_tokens, "logprobs": 0, **fields.pop("sampling", {})}
    request = generate_request(
        "hello", request_id="mine", resumable=True, return_token_ids=True, sampling=sampling, **fields
    )
    call, answer = client.generate(request, timeout=60), Answer()
    async for response in call:
        take(answer, response)
        if len(answer.token_ids) >= num_tokens:
            break
    return call, answer


def offset_of(answer: Answer) -> int:
    return answer.deltas[-1].offset if answer.deltas else 0


def hurry(worker: ScriptedWorker) -> None:
    """The rest may come quickly."""
    worker.tokens_per_step = 50


def assert_continued(first: Answer, rest: Answer, num_tokens: int = LONG) -> None:
    """Both together are the undisturbed answer: nothing is missing, nothing is there twice."""
    assert rest.error is None, reason_of(rest.error)
    assert rest.finished is not None
    assert rest.accepted is not None
    assert first.text + rest.text == text_of(b"hello", num_tokens)
    assert bytes(first.token_ids + rest.token_ids).decode() == text_of(b"hello", num_tokens)
    logprobs = [it.sampled.token_id for delta in (*first.deltas, *rest.deltas) for it in delta.logprobs]
    assert logprobs == first.token_ids + rest.token_ids
    assert rest.finished.usage == types_pb2.Usage(prompt_tokens=5, completion_tokens=num_tokens)
    assert offset_of(rest) == num_tokens


async def test_a_client_that_left_goes_on_at_another_gateway(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    (one, first), (_, second) = [await rig.serving(worker) for _ in range(2)]
    call, answer = await begun(first, 40, LONG)
    call.cancel()
    await eventually(lambda: one.dispatcher.live == ())
    hurry(worker)
    rest = await resumed(second, offset_of(answer))
    assert_continued(answer, rest)
    [_, submit] = worker.submitted
    assert len(submit.output_token_ids) >= len(answer.token_ids), "what was told is written down by then"


async def test_a_stream_survives_the_death_of_its_gateway(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    doomed, first = await rig.serving(worker, heartbeat_ttl_s=1.0)
    _, second = await rig.serving(worker)
    call, answer = await begun(first, 30, LONG)
    # What a SIGKILL does, as far as the store can see: no finish, no heartbeat, no flush.
    await doomed._background.close()
    hurry(worker)
    rest = await resumed(second, offset_of(answer))
    assert_continued(answer, rest)
    call.cancel()
    await eventually(lambda: doomed.dispatcher.live == ())


async def test_a_stream_survives_the_deployment_of_its_gateway(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    leaving, first = await rig.serving(worker)
    _, second = await rig.serving(worker)
    call, answer = await begun(first, 30, LONG)
    await rig.stop(leaving, drain_s=0.1)
    await read(call, answer)
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    hurry(worker)
    rest = await resumed(second, offset_of(answer))
    assert_continued(answer, rest)
    [_, submit] = worker.submitted
    assert len(submit.output_token_ids) >= len(answer.token_ids)


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_who_resumes_a_live_stream_ends_it(rig: Rig, num_gateways: int) -> None:
    worker = await rig.worker(step_s=0.01)
    clients = [(await rig.serving(worker))[1] for _ in range(num_gateways)]
    call, answer = await begun(clients[0], 30, LONG)
    rest = asyncio.create_task(resumed(clients[-1], offset_of(answer)))
    former = Answer()
    async for response in call:
        take(former, response)
    assert former.finished is not None
    assert former.finished.reason == types_pb2.FINISH_REASON_CANCELLED
    hurry(worker)
    assert_continued(answer, await rest)


async def test_who_resumes_while_the_former_run_cannot_end_is_told_to_come_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.worker(step_s=0.01)
    app, client = await rig.serving(worker)
    call, answer = await begun(client, 30, LONG)
    may_end, forget = asyncio.Event(), app.dispatcher.unregister
    ending: list[asyncio.Task[None]] = []

    async def late(live: LiveRequest) -> None:
        await may_end.wait()
        forget(live)

    monkeypatch.setattr(app.dispatcher, "unregister", lambda live: ending.append(asyncio.create_task(late(live))))
    monkeypatch.setattr(handler, "_CLOSE_WAIT_S", 0.05)
    refused = await resumed(client, offset_of(answer))
    assert refused.error is not None
    assert (refused.error.code(), reason_of(refused.error)) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    monkeypatch.undo()
    may_end.set()
    await read(call)
    await eventually(lambda: app.dispatcher.live == ())
    hurry(worker)
    assert_continued(answer, await resumed(client, offset_of(answer)))


async def test_a_stop_string_is_found_across_the_break_and_after_it(rig: Rig) -> None:
    worker = await rig.worker(script=spell("one two THE END three"), step_s=0.02)
    _, client = await rig.serving(worker)
    call, answer = await begun(client, 9, sampling={"stop": ["THE END"]})  # the T is held back
    call.cancel()
    rest = await resumed(client, offset_of(answer))
    assert rest.finished is not None
    assert rest.finished.reason == types_pb2.FINISH_REASON_STOP
    assert answer.text + rest.text == "one two "
    again = await resumed(client)
    assert again.text == "one two "
    assert again.finished is not None
    assert again.finished.usage == rest.finished.usage


async def test_a_finished_answer_is_replayed_from_everywhere_and_not_generated_again(rig: Rig) -> None:
    worker = await rig.worker(script=spell("日本語 👩‍👩‍👧‍👦 ok "), step_s=None)
    app, client = await rig.serving(worker)
    asked = asyncio.create_task(begun(client, 60, 60))
    await worker.wait_for(lambda: len(worker.running) == 1)
    [live] = app.dispatcher.live
    for number in range(1, 61):
        await worker.step()
        # And its part of the answer is on its way before the next one comes: they would be sent as one.
        await eventually(lambda number=number: len(live.output_token_ids) == number)  # type: ignore[misc]
        await eventually(lambda: live.mailbox.num_unread_tokens == 0)
    call, answer = await asked
    async for response in call:
        take(answer, response)
    await eventually(lambda: app.dispatcher.live == ())
    for delta, text in zip(answer.deltas, _texts_so_far(answer), strict=True):
        rest = await resumed(client, delta.offset)
        assert text + rest.text == answer.text
        assert rest.finished is not None
        assert rest.finished.usage.completion_tokens == 60
    assert len(worker.submitted) == 1
    assert len(answer.deltas) > 10


def _texts_so_far(answer: Answer) -> Iterator[str]:
    text = ""
    for delta in answer.deltas:
        text += delta.text
        yield text


async def test_a_cancelled_answer_stays_cancelled(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    app, client = await rig.serving(worker)
    call, answer = await begun(client, 20)
    await client.cancel("mine")
    async for response in call:
        take(answer, response)
    await eventually(lambda: app.dispatcher.live == ())
    rest = await resumed(client, 5)
    assert rest.finished is not None
    assert rest.finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert len(worker.submitted) == 1


async def test_only_what_is_resumable_and_known_is_resumed_and_by_its_tenant_alone(rig: Rig) -> None:
    app, client = await rig.serving(await rig.worker(), journal_ttl_s=0.3)
    stranger = await rig.client(app, "key-paid")
    assert (await client.ask(request_id="plain")).error is None
    await begun(client, NUM_TOKENS)
    for asking, request_id in ((client, "plain"), (client, "nobody"), (stranger, "mine")):
        refused = await resumed(asking, request_id=request_id)
        assert refused.error is not None
        assert (refused.error.code(), reason_of(refused.error)) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    await eventually(lambda: app.dispatcher.live == ())
    async with asyncio.timeout(60):
        while (await resumed(client, offset=NUM_TOKENS)).error is None:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.5)  # longer than it is kept: each resume keeps it anew
    for request_id in ("", "a b"):
        refused = await resumed(client, request_id=request_id)
        assert refused.error is not None
        assert refused.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_id_of_a_resumable_answer_is_taken_while_it_is_kept(rig: Rig) -> None:
    app, client = await rig.serving(await rig.worker())
    await begun(client, NUM_TOKENS)
    await eventually(lambda: app.dispatcher.live == ())
    refused = await client.ask(request_id="mine", resumable=True)
    assert refused.error is not None
    assert refused.error.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_key_makes_a_finished_request_safe_to_repeat(rig: Rig) -> None:
    worker = await rig.worker()
    (_, first), (_, second) = [await rig.serving(worker) for _ in range(2)]
    request = generate_request("hello", idempotency_key="order 17", sampling={"max_tokens": 20, "temperature": 1.0})
    answers = [await client.call("Complete", request) for client in (first, second, first)]
    assert {answer.text for answer in answers} == {text_of(b"hello", 20)}
    assert len({(answer.request_id, answer.seed) for answer in answers}) == 1
    assert len(worker.submitted) == 1
    stranger = await rig.client(rig.gateways[0], "key-paid")
    assert (await stranger.call("Complete", request)).text == text_of(b"hello", 20)
    assert len(worker.submitted) == 2, "keys are each tenant's own"


async def test_a_repeated_request_replaces_the_live_one_and_nothing_runs_twice(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    served = [await rig.serving(worker) for _ in range(2)]
    request = generate_request("hello", idempotency_key="k", sampling={"max_tokens": LONG})

    async def ask(number: int) -> Answer:
        await asyncio.sleep(0.15 * number)
        return await read(served[number % 2][1].generate(request, timeout=60))

    asking = [asyncio.create_task(ask(number)) for number in range(6)]
    await eventually(lambda: sum(task.done() for task in asking) == 5)
    hurry(worker)
    answers = await asyncio.gather(*asking)
    reasons = [answer.finished.reason for answer in answers if answer.finished is not None]
    assert reasons.count(types_pb2.FINISH_REASON_LENGTH) == 1
    assert reasons.count(types_pb2.FINISH_REASON_CANCELLED) == 5
    [whole] = [it for it in answers if it.finished and it.finished.reason == types_pb2.FINISH_REASON_LENGTH]
    assert whole.text == text_of(b"hello", LONG)
    assert worker.most_running == 1, "never two at once"
    assert worker.num_generated < 2 * LONG


async def test_a_key_belongs_to_one_content(rig: Rig) -> None:
    _, client = await rig.serving(await rig.worker())
    assert (await client.ask("one", idempotency_key="k")).error is None
    for changes in ({"text": "two"}, {"text": "one", "sampling": {"max_tokens": 9}}):
        refused = await client.ask(changes.pop("text"), idempotency_key="k", **changes)  # type: ignore[arg-type]
        assert refused.error is not None
        assert refused.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "idempotency_key" in (refused.error.details() or "")
    for fields in ({"idempotency_key": "x" * 257}, {"idempotency_key": "k", "request_id": "mine"}):
        refused = await client.ask("one", **fields)
        assert refused.error is not None
        assert refused.error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refused_request_can_be_asked_again_with_its_key(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    _, client = await rig.serving(worker, max_queue_length=1)
    blocking = asyncio.create_task(client.ask("first", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    waiting = asyncio.create_task(client.ask("second", sampling={"max_tokens": 1}))
    await eventually(lambda: len(rig.gateways[0].dispatcher.live) == 2)
    await eventually(lambda: all(live.is_enqueued for live in rig.gateways[0].dispatcher.live))
    refused = await client.ask("third", idempotency_key="k", sampling={"max_tokens": 1})
    assert refused.error is not None
    assert reason_of(refused.error) == "QUEUE_FULL"
    again = None
    for task, num_taken in ((blocking, 2), (waiting, 3)):
        await worker.step()
        assert (await asyncio.wait_for(task, 60)).error is None
        if again is None:
            await worker.wait_for(lambda: len(worker.submitted) == 2)  # before that, the queue is full
            again = asyncio.create_task(client.ask("third", idempotency_key="k", sampling={"max_tokens": 1}))
        await worker.wait_for(lambda num_taken=num_taken: len(worker.submitted) == num_taken)  # type: ignore[misc]
    await worker.step()
    assert again is not None
    assert (await again).text == text_of(b"third", 1)
