"""A request from the client's wire to a worker and back."""

from __future__ import annotations

import asyncio

import pytest

from protos.inference.v1 import inference_pb2, types_pb2
from tests.integration.gateway.rig import Rig, eventually, generate_request, read
from tests.support.scripted_worker import END_ID, MODEL, VOCAB_SIZE, spell, text_of


async def test_a_stream_flows_end_to_end(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    answer = await client.ask("hello", sampling={"max_tokens": 12, "seed": 5})
    assert answer.error is None
    assert answer.accepted is not None
    assert answer.finished is not None
    assert (answer.accepted.model, answer.accepted.prompt_tokens, answer.accepted.seed) == (MODEL, 5, 5)
    assert answer.text == text_of(b"hello", 12)
    assert answer.finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert answer.finished.usage == types_pb2.Usage(prompt_tokens=5, completion_tokens=12)
    assert 0 <= answer.finished.timing.queue_s <= answer.finished.timing.ttft_s <= answer.finished.timing.total_s


async def test_the_worker_gets_what_the_client_asked_for(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    sampling = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "seed": 2**64 - 1,
        "max_tokens": 3,
        "min_tokens": 2,
        "stop_token_ids": [1, 2],
        "logit_bias": {3: 4.0},
        "logprobs": 2,
        "ignore_eos": True,
    }
    answer = await client.ask(tokens=inference_pb2.TokenPrompt(token_ids=[104, 105]), sampling=sampling)
    assert answer.error is None
    [submit] = worker.submitted
    assert list(submit.prompt_token_ids) == [104, 105]
    assert submit.sampling == types_pb2.SamplingParams(**sampling)
    assert submit.band == types_pb2.BAND_NORMAL
    assert submit.request_id.startswith("acme/")
    assert submit.attempt == 1


async def test_unset_fields_take_their_documented_defaults(rig: Rig) -> None:
    worker = await rig.worker(context_length=50)
    _, client = await rig.serving(worker)
    answer = await read(client.generate(inference_pb2.GenerateRequest(text="1234567890")))
    sampling = worker.submitted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (1.0, 0, 1.0, 1.0)
    assert sampling.max_tokens == 40
    assert not sampling.HasField("logprobs")
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == 40
    assert answer.accepted is not None
    assert sampling.seed == answer.accepted.seed


async def test_chat_goes_through_the_models_template(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    answer = await client.ask(chat=chat)
    assert answer.error is None
    expected = [256, *b"user\nhi", 257, 256, *b"assistant\n"]
    assert list(worker.submitted[0].prompt_token_ids) == expected
    counted = await client.call("CountTokens", inference_pb2.CountTokensRequest(chat=chat))
    assert counted.num_tokens == len(expected)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 64])
async def test_deltas_hold_whole_characters_and_no_stop_string(rig: Rig, tokens_per_step: int) -> None:
    text = "日本語 👩‍👩‍👧‍👦 ok [stop] never"
    worker = await rig.worker(script=spell(text), tokens_per_step=tokens_per_step)
    _, client = await rig.serving(worker)
    answer = await client.ask(sampling={"max_tokens": 4000, "stop": ["[stop]", "[stopper"]})
    assert answer.text == "日本語 👩‍👩‍👧‍👦 ok "
    assert all("\ufffd" not in delta.text and "[" not in delta.text for delta in answer.deltas)
    assert answer.finished is not None
    assert answer.finished.reason == types_pb2.FINISH_REASON_STOP
    assert answer.finished.usage.completion_tokens == len("日本語 👩‍👩‍👧‍👦 ok [stop]".encode())
    await worker.wait_for(lambda: not worker.running)
    assert len(worker.aborted) == 1, "the worker is told to stop"


async def test_bytes_that_are_no_character_come_out_at_the_end(rig: Rig) -> None:
    raw = "ab€".encode()[:-1]
    worker = await rig.worker(script=lambda submit, position: raw[position])
    _, client = await rig.serving(worker)
    answer = await client.ask(sampling={"max_tokens": 4})
    assert answer.text == "ab\ufffd"


async def test_an_end_token_ends_the_text_without_being_in_it(rig: Rig) -> None:
    worker = await rig.worker(script=lambda submit, position: END_ID if position == 3 else 120)
    _, client = await rig.serving(worker)
    answer = await client.ask(sampling={"max_tokens": 9}, return_token_ids=True)
    assert answer.text == "xxx"
    assert answer.finished is not None
    assert answer.finished.reason == types_pb2.FINISH_REASON_STOP
    assert answer.token_ids == [120, 120, 120, END_ID]


async def test_token_ids_and_log_probabilities_come_if_asked_for(rig: Rig) -> None:
    worker = await rig.worker(script=spell("xy!stop"), tokens_per_step=5)
    _, client = await rig.serving(worker)
    answer = await client.ask(sampling={"max_tokens": 20, "logprobs": 1, "stop": ["!s"]}, return_token_ids=True)
    positions = [position for delta in answer.deltas for position in delta.logprobs]
    assert answer.text == "xy"
    assert answer.token_ids == list(b"xy!s")
    assert [position.sampled.text for position in positions] == [b"x", b"y", b"!", b"s"]
    assert positions[0].top[0].token_id == ord("x")


async def test_complete_gives_the_same_in_one_message(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    request = generate_request("hello", sampling={"max_tokens": 9, "seed": 3}, return_token_ids=True)
    streamed = await read(client.generate(request))
    whole = await client.call("Complete", request)
    assert whole.text == streamed.text == text_of(b"hello", 9)
    assert list(whole.token_ids) == streamed.token_ids
    assert streamed.finished is not None
    assert (whole.reason, whole.usage, whole.seed) == (streamed.finished.reason, streamed.finished.usage, 3)


async def test_models_are_listed_with_their_workers(rig: Rig) -> None:
    workers = [await rig.worker(worker_id="a"), await rig.worker(worker_id="b")]
    app, client = await rig.serving(*workers)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
    [model] = (await client.call("ListModels", inference_pb2.ListModelsRequest())).models
    assert (model.name, model.vocab_size, model.context_length, model.num_workers) == (MODEL, VOCAB_SIZE, 4096, 2)


async def test_tenants_never_share_cached_prefixes_or_ids(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    other = await rig.client(app, "key-paid")
    calls = [it.generate(generate_request("same", request_id="one")) for it in (client, other)]
    answers = [asyncio.create_task(read(call)) for call in calls]
    await worker.wait_for(lambda: len(worker.running) == 2)
    first, second = worker.submitted
    assert {first.request_id.partition("#")[0], second.request_id.partition("#")[0]} == {"acme/one", "paid/one"}
    assert first.cache_salt
    assert first.cache_salt != second.cache_salt
    for _ in range(8):
        await worker.step()
    assert [(await answer).error for answer in answers] == [None, None]


async def test_bands_are_served_strictly_in_order_and_only_lowered_by_clients(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1, step_s=None)
    app, acme = await rig.serving(worker)
    paid, batch = await rig.client(app, "key-paid"), await rig.client(app, "key-batch")
    blocker = asyncio.create_task(acme.ask("blocker", sampling={"max_tokens": 1}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    asked = [
        (batch, generate_request("batch", band=types_pb2.BAND_HIGH, sampling={"max_tokens": 1})),
        (acme, generate_request("acme", band=types_pb2.BAND_HIGH, sampling={"max_tokens": 1})),
        (paid, generate_request("lowered", band=types_pb2.BAND_LOW, sampling={"max_tokens": 1})),
        (paid, generate_request("paid", sampling={"max_tokens": 1})),
    ]
    answers = []
    for client, request in asked:
        call = client.generate(request)
        assert (await anext(aiter(call))).HasField("accepted")
        answers.append(asyncio.create_task(read(call)))
    for count in range(2, 6):
        await worker.step()
        await worker.wait_for(lambda count=count: len(worker.submitted) >= count)  # type: ignore[misc]
    await worker.step()
    assert [(await answer).error for answer in [blocker, *answers]] == [None] * 5
    order = [bytes(submit.prompt_token_ids).decode() for submit in worker.submitted]
    assert order == ["blocker", "paid", "acme", "batch", "lowered"]
