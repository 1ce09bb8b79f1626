"""Every kind of bad input, with the status and reason that the client sees."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from protos.inference.v1 import inference_pb2, types_pb2
from tests.integration.gateway.rig import Client, Rig, detail_of, find_detail, generate_request, read, reason_of
from tests.support.scripted_worker import MODEL, VOCAB_SIZE

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONTEXT = 4096


def chat(*turns: tuple[str, str]) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role=r, content=c) for r, c in turns])


def tokens(*token_ids: int) -> inference_pb2.TokenPrompt:
    return inference_pb2.TokenPrompt(token_ids=token_ids)


# Name: fields of the request, reason, words that the message must contain.
REFUSED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "no prompt": ({"tokens": None}, "EMPTY_PROMPT", ["chat, text and tokens"]),
    "empty text": ({"text": ""}, "EMPTY_PROMPT", ["text"]),
    "no messages": ({"chat": chat()}, "EMPTY_PROMPT", ["chat.messages"]),
    "no token ids": ({"tokens": tokens()}, "EMPTY_PROMPT", ["tokens"]),
    "empty role": ({"chat": chat(("", "x"))}, "INVALID_PARAMETER", ["chat.messages[0].role"]),
    "unknown role": ({"chat": chat(("user", "x"), ("king", "x"))}, "TEMPLATE_ERROR", ["chat.messages[1].role"]),
    "prompt fills the context": ({"text": "x" * CONTEXT}, "PROMPT_TOO_LONG", [str(CONTEXT), str(CONTEXT - 1)]),
    "prompt over the context": ({"text": "x" * 9000}, "PROMPT_TOO_LONG", ["9000", str(CONTEXT)]),
    "tokens over the context": ({"tokens": tokens(*[1] * 5000)}, "PROMPT_TOO_LONG", ["5000", str(CONTEXT)]),
    "3 MB of text": ({"text": "x" * 3_000_000}, "PROMPT_TOO_LONG", ["3000000", str(CONTEXT)]),
    "token id outside": ({"tokens": tokens(1, VOCAB_SIZE)}, "INVALID_TOKEN_ID", [str(VOCAB_SIZE)]),
    "huge token id": ({"tokens": tokens(2**32 - 1)}, "INVALID_TOKEN_ID", [str(VOCAB_SIZE)]),
    "max_tokens 0": ({"sampling": {"max_tokens": 0}}, "INVALID_PARAMETER", ["max_tokens", "at least 1"]),
    "temperature negative": ({"sampling": {"temperature": -0.1}}, "INVALID_PARAMETER", ["temperature", "0 to 100"]),
    "temperature NaN": ({"sampling": {"temperature": math.nan}}, "INVALID_PARAMETER", ["temperature", "nan"]),
    "temperature inf": ({"sampling": {"temperature": math.inf}}, "INVALID_PARAMETER", ["temperature", "inf"]),
    "temperature 101": ({"sampling": {"temperature": 101}}, "INVALID_PARAMETER", ["temperature"]),
    "top_p over 1": ({"sampling": {"top_p": 1.5}}, "INVALID_PARAMETER", ["top_p", "0 to 1"]),
    "top_p negative": ({"sampling": {"top_p": -0.5}}, "INVALID_PARAMETER", ["top_p"]),
    "top_p NaN": ({"sampling": {"top_p": math.nan}}, "INVALID_PARAMETER", ["top_p"]),
    "top_k negative": ({"sampling": {"top_k": -1}}, "INVALID_PARAMETER", ["top_k", "-1"]),
    "min_p over 1": ({"sampling": {"min_p": 2}}, "INVALID_PARAMETER", ["min_p"]),
    "repetition_penalty 0": ({"sampling": {"repetition_penalty": 0}}, "INVALID_PARAMETER", ["above 0 to 10"]),
    "repetition_penalty 11": ({"sampling": {"repetition_penalty": 11}}, "INVALID_PARAMETER", ["above 0 to 10"]),
    "presence_penalty 3": ({"sampling": {"presence_penalty": 3}}, "INVALID_PARAMETER", ["-2 to 2"]),
    "frequency_penalty -3": ({"sampling": {"frequency_penalty": -3}}, "INVALID_PARAMETER", ["-2 to 2"]),
    "min over max tokens": ({"sampling": {"min_tokens": 9, "max_tokens": 8}}, "INVALID_PARAMETER", ["min_tokens"]),
    "logprobs 21": ({"sampling": {"logprobs": 21}}, "INVALID_PARAMETER", ["logprobs", "20"]),
    "bias outside": ({"sampling": {"logit_bias": {VOCAB_SIZE: 1}}}, "INVALID_TOKEN_ID", ["logit_bias"]),
    "bias too large": ({"sampling": {"logit_bias": {1: 101}}}, "INVALID_PARAMETER", ["logit_bias[1]", "-100 to 100"]),
    "bias NaN": ({"sampling": {"logit_bias": {1: math.nan}}}, "INVALID_PARAMETER", ["logit_bias[1]"]),
    "stop id outside": ({"sampling": {"stop_token_ids": [VOCAB_SIZE]}}, "INVALID_TOKEN_ID", ["stop_token_ids"]),
    "65 stop ids": ({"sampling": {"stop_token_ids": [1] * 65}}, "INVALID_PARAMETER", ["64"]),
    "empty stop": ({"sampling": {"stop": ["a", ""]}}, "INVALID_PARAMETER", ["stop[1]"]),
    "long stop": ({"sampling": {"stop": ["x" * 257]}}, "INVALID_PARAMETER", ["257", "256"]),
    "17 stops": ({"sampling": {"stop": ["x"] * 17}}, "INVALID_PARAMETER", ["16"]),
    "bad id": ({"request_id": "a b"}, "INVALID_PARAMETER", ["request_id"]),
    "id with a slash": ({"request_id": "a/b"}, "INVALID_PARAMETER", ["request_id"]),
    "long id": ({"request_id": "x" * 129}, "INVALID_PARAMETER", ["128"]),
    "unknown band": ({"band": 9}, "INVALID_PARAMETER", ["band"]),
}


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_refused_with_reason_and_what_is_allowed(rig: Rig, method: str) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    for name, (fields, reason, words) in REFUSED.items():
        error = await refusal(client, method, generate_request(**fields))
        assert (error.code(), reason_of(error)) == (INVALID, reason), name
        assert all(word in (error.details() or "") for word in words), f"{name}: {error.details()}"
        assert find_detail(error, error_details_pb2.RetryInfo) is None, name
        assert len(error.details() or "") < 1000, name
    assert worker.submitted == []
    assert app.dispatcher.live == ()


async def refusal(client: Client, method: str, request: Any) -> grpc.aio.AioRpcError:
    if method == "Generate":
        answer = await read(client.generate(request))
        assert answer.accepted is None
        assert answer.error is not None
        return answer.error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.call(method, request)
    return caught.value


async def test_the_field_is_named_in_bad_request(rig: Rig) -> None:
    _, client = await rig.serving(await rig.worker())
    error = await refusal(client, "Complete", generate_request(sampling={"top_k": -3}))
    [violation] = detail_of(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "sampling.top_k"
    assert detail_of(error, error_details_pb2.ErrorInfo).domain == "tidegate"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 100},
        {"top_p": 0},
        {"top_k": 2**31 - 1},
        {"min_tokens": 8},
        {"logit_bias": {0: -100, VOCAB_SIZE - 1: 100}},
        {"logprobs": 0},
        {"max_tokens": 2**32 - 1, "stop_token_ids": [101]},
        {"stop": ["x" * 256] * 16},
    ],
)
async def test_values_at_the_edge_are_served(rig: Rig, sampling: dict[str, Any]) -> None:
    _, client = await rig.serving(await rig.worker(tokens_per_step=512))
    answer = await client.ask(sampling=sampling)
    assert answer.error is None
    assert answer.finished is not None


async def test_the_longest_prompt_gets_one_token(rig: Rig) -> None:
    _, client = await rig.serving(await rig.worker())
    answer = await client.ask("x" * (CONTEXT - 1), sampling={"max_tokens": 100})
    assert answer.error is None
    assert answer.finished is not None
    assert answer.finished.usage == types_pb2.Usage(prompt_tokens=CONTEXT - 1, completion_tokens=1)


@pytest.mark.parametrize(("num_blocks", "is_served"), [(2, False), (3, True)])
async def test_a_prompt_that_no_pool_can_hold_is_refused_at_once(rig: Rig, num_blocks: int, is_served: bool) -> None:
    _, client = await rig.serving(await rig.worker(num_blocks=num_blocks, block_size=16))
    answer = await client.ask("x" * 32, sampling={"max_tokens": 4})
    if is_served:
        assert answer.error is None
        return
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (INVALID, "NEVER_FITS")
    assert "needs 3 KV blocks of 16 tokens" in (answer.error.details() or "")
    assert "largest worker has 2" in (answer.error.details() or "")


async def test_unknown_model(rig: Rig) -> None:
    _, client = await rig.serving(await rig.worker())
    for method, request in [
        ("Generate", generate_request(model="gpt")),
        ("Complete", generate_request(model="gpt")),
        ("CountTokens", inference_pb2.CountTokensRequest(model="gpt", text="x")),
    ]:
        error = await refusal(client, method, request)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
        assert MODEL in (error.details() or "")


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x05abc"])
@pytest.mark.parametrize("method", ["Generate", "Complete", "CountTokens", "Cancel"])
async def test_bytes_that_are_no_message(rig: Rig, method: str, raw: bytes) -> None:
    _, client = await rig.serving(await rig.worker())
    path = f"/inference.v1.Inference/{method}"
    if method == "Generate":
        answer = aiter(client.channel.unary_stream(path)(raw, metadata=client.metadata))
        call = anext(answer)
    else:
        call = client.channel.unary_unary(path)(raw, metadata=client.metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert (caught.value.code(), reason_of(caught.value)) == (INVALID, "MALFORMED_MESSAGE")
    assert "UTF-8" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "MISSING_CREDENTIAL"),
        ((("authorization", "Bearer nobody"),), "UNKNOWN_CREDENTIAL"),
        ((("authorization", "key-acme"),), "UNKNOWN_CREDENTIAL"),
        ((("authorization", "Bearer "),), "UNKNOWN_CREDENTIAL"),
        ((("authorization", "Bearer key-acme"), ("authorization", "Bearer key-paid")), "UNKNOWN_CREDENTIAL"),
        ((("x-tenant", "acme"), ("user", "acme")), "MISSING_CREDENTIAL"),
    ],
)
async def test_no_key_no_service(rig: Rig, metadata: tuple[tuple[str, str], ...], reason: str) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    client.metadata = metadata  # type: ignore[assignment]
    for method, request in [
        ("Generate", generate_request()),
        ("Complete", generate_request()),
        ("Cancel", inference_pb2.CancelRequest(request_id="x")),
        ("CountTokens", inference_pb2.CountTokensRequest(text="x")),
        ("ListModels", inference_pb2.ListModelsRequest()),
    ]:
        error = await refusal(client, method, request)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.UNAUTHENTICATED, reason)
    assert worker.submitted == []


async def test_an_oversize_message_is_refused_with_the_limit(rig: Rig) -> None:
    _, client = await rig.serving(await rig.worker(), max_receive_message_bytes=100_000)
    for method in ("Generate", "Complete"):
        error = await refusal(client, method, generate_request("x" * 150_000))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert "at most 100000 are allowed" in (error.details() or "")
    # What is far larger is not even read.
    error = await refusal(client, "Generate", generate_request("x" * 250_000))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.ask("hello")).error is None
