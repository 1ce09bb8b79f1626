"""The client against a scripted gateway, over real connections."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from client import (
    Accepted,
    Chat,
    Client,
    ClientError,
    ClientOptions,
    Delta,
    Event,
    Finished,
    Message,
    Model,
    Sampling,
    Text,
    Timing,
    TokenCount,
    Tokens,
)
from client.errors import DETAILS_KEY, from_rpc_error
from common.errors import (
    DeadlineExceededError,
    FieldViolation,
    InvalidRequestError,
    LimitExceededError,
    NotFoundError,
    QuotaViolation,
    TidegateError,
    UnavailableError,
)
from common.types import Band, FinishReason, Reason, Usage
from protos.inference.v1 import inference_pb2, types_pb2
from tests.unit.client.scripted import BreakableLink, ScriptedGateway, accepted, connected, delta, finished, serving

PROMPT = Text("hi")
BUSY = LimitExceededError(
    "over 3 requests per minute",
    reason=Reason.REQUEST_RATE,
    retry_after_s=1.25,
    quotas=[QuotaViolation("tenant:acme", "3 requests per minute")],
)


class FakeClock:
    """Time that passes only in sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    async def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now += duration_s


async def events_of(client: Client, **options: float) -> list[Event]:
    return [event async for event in client.generate(PROMPT, **options)]  # type: ignore[arg-type]


async def test_events_arrive_typed_and_in_order() -> None:
    gateway = ScriptedGateway([accepted(), delta("a"), delta("b"), finished()])
    async with connected(gateway) as client:
        assert await events_of(client) == [
            Accepted("r1", "m", 3, 2**64 - 1),
            Delta("a"),
            Delta("b"),
            Finished(FinishReason.STOP, Usage(3, 1, 2), Timing(0.5, 1.0, 2.0)),
        ]


async def test_an_answer_that_broke_off_is_gone_on_with() -> None:
    error = UnavailableError("going", reason=Reason.DRAINING)
    gateway = ScriptedGateway([accepted(), delta("a", 3), error], [accepted(), delta("b", 5), finished()])
    async with connected(gateway) as client:
        offset = 0
        with pytest.raises(ClientError):  # noqa: PT012 - the loop is the call
            async for event in client.generate(PROMPT, resumable=True, idempotency_key="k"):
                offset = event.offset if isinstance(event, Delta) else offset
        rest = [event async for event in client.resume("r1", offset)]
    assert (gateway.requests[0].resumable, gateway.requests[0].idempotency_key) == (True, "k")
    assert gateway.requests[1] == inference_pb2.ResumeRequest(request_id="r1", offset=3)
    assert rest[1] == Delta("b", offset=5)


async def test_request_carries_what_was_given_and_nothing_else() -> None:
    gateway = ScriptedGateway([finished()], [finished()], [finished()])
    sampling = Sampling(temperature=0.0, seed=2**64 - 1, stop=["x"], logit_bias={7: -1.5}, logprobs=0)
    async with connected(gateway, lambda address: Client(address, "key-1")) as client:
        options = {"model": "m", "request_id": "mine"}
        stream = client.generate(Tokens([1, 2]), sampling, band=Band.LOW, return_token_ids=True, **options)  # type: ignore[arg-type]
        assert len([event async for event in stream]) == 1
        assert len([event async for event in client.chat([Message("user", "é")])]) == 1
        assert len([event async for event in client.generate(Tokens([]))]) == 1
    assert gateway.metadata[0]["authorization"] == "Bearer key-1"
    assert gateway.requests[0] == inference_pb2.GenerateRequest(
        request_id="mine",
        model="m",
        tokens=inference_pb2.TokenPrompt(token_ids=[1, 2]),
        sampling=types_pb2.SamplingParams(
            temperature=0.0, seed=2**64 - 1, stop=["x"], logit_bias={7: -1.5}, logprobs=0
        ),
        band=types_pb2.BAND_LOW,
        return_token_ids=True,
    )
    assert not gateway.requests[1].sampling.HasField("temperature")
    assert gateway.requests[1].chat.messages[0].content == "é"
    assert gateway.requests[2].WhichOneof("prompt") == "tokens"


async def test_unary_calls() -> None:
    logprobs = types_pb2.PositionLogprobs(sampled=types_pb2.TokenLogprob(token_id=5, logprob=-0.5, text=b"\xf0"))
    gateway = ScriptedGateway(
        [
            inference_pb2.CompleteResponse(
                request_id="r", model="m", text="t", reason=types_pb2.FINISH_REASON_LENGTH, seed=4, logprobs=[logprobs]
            )
        ],
        [inference_pb2.CountTokensResponse(num_tokens=4, context_length=99)],
        [inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m", context_length=9, num_workers=2)])],
        [inference_pb2.CancelResponse()],
    )
    async with connected(gateway) as client:
        completion = await client.complete(PROMPT)
        assert (completion.text, completion.reason, completion.seed) == ("t", FinishReason.LENGTH, 4)
        assert completion.logprobs[0].sampled.text == b"\xf0"
        assert await client.count_tokens(Chat([Message("user", "x")])) == TokenCount(4, 99)
        assert await client.list_models() == [Model("m", 9, 0, 2)]
        await client.cancel("r")
    assert gateway.requests[3].request_id == "r"


@pytest.mark.parametrize(
    "error",
    [
        BUSY,
        InvalidRequestError.of_field("sampling.top_p", "it is 2; allowed is 0 to 1"),
        InvalidRequestError("several", fields=[FieldViolation("a", "b"), FieldViolation("c", "d")]),
        NotFoundError("no model 'x'", reason=Reason.UNKNOWN_MODEL),
        UnavailableError("no worker serves the model", retry_after_s=0.0),
        UnavailableError("é" * 300, reason=Reason.WORKER_LOST),
    ],
)
async def test_errors_are_decoded_from_rich_details(error: TidegateError) -> None:
    async with connected(ScriptedGateway([error], [accepted(), error])) as client:
        with pytest.raises(ClientError) as of_unary:
            await client.complete(PROMPT)
        with pytest.raises(ClientError) as of_stream:
            await events_of(client)
    for caught in (of_unary.value, of_stream.value):
        assert caught.status == error.status
        assert caught.reason is error.reason
        assert caught.message == error.message
        assert caught.retry_after_s == error.retry_after_s
        assert caught.fields == error.fields
        assert caught.quotas == error.quotas
        assert str(caught) == f"{error.status}/{error.reason.name}: {error.message}"


@pytest.mark.parametrize(
    "details",
    [
        b"\xff\xff not a message",
        status_pb2.Status(
            code=14, details=[AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")]
        ).SerializeToString(),
        status_pb2.Status(code=14, details=[AnyMessage(type_url="example.com/unknown")]).SerializeToString(),
        None,
    ],
)
def test_details_that_cannot_be_read_are_left_out(details: bytes | None) -> None:
    trailers = grpc.aio.Metadata() if details is None else grpc.aio.Metadata((DETAILS_KEY, details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="gone")
    decoded = from_rpc_error(error)
    assert (decoded.status, decoded.message, decoded.reason, decoded.retry_after_s) == (
        "UNAVAILABLE",
        "gone",
        None,
        None,
    )


def test_a_call_that_a_leaving_server_never_began_is_unavailable() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="CANCELLED"
    )
    assert from_rpc_error(error).status == "UNAVAILABLE"


async def test_nobody_listens() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ClientError) as caught:
            await client.list_models(timeout_s=60)
    assert (caught.value.status, caught.value.reason) == ("UNAVAILABLE", None)


@pytest.mark.parametrize("prompt", [Tokens([-1]), Tokens([2**32]), Text("\ud800"), Chat([Message("user", "\udfff")])])
async def test_prompts_that_do_not_fit_the_wire(prompt: Chat | Text | Tokens) -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ClientError, match="does not fit its field") as caught:
            await client.complete(prompt)
    assert caught.value.status == "INVALID_ARGUMENT"
    assert caught.value.fields[0].field.startswith(("tokens.token_ids", "text", "chat.messages[0]"))


async def test_sampling_that_does_not_fit_the_wire_names_the_field() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(ClientError, match=r"sampling\.max_tokens"):
            await client.complete(PROMPT, Sampling(max_tokens=-1))


@pytest.mark.parametrize("key", ["näh", "a\nb", " key"])
async def test_key_that_cannot_be_sent(key: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII"):
        Client("127.0.0.1:1", key)


async def test_stopping_the_iteration_cancels_the_request() -> None:
    gateway = ScriptedGateway([accepted(), delta("a"), asyncio.Event()])
    async with connected(gateway) as client:
        async with aclosing(client.generate(PROMPT)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await asyncio.wait_for(gateway.has_ended.wait(), 60)


async def test_cancelling_the_reader_cancels_the_request() -> None:
    gateway = ScriptedGateway([accepted(), asyncio.Event()])
    async with connected(gateway) as client:
        seen = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate(PROMPT):
                seen.set()

        reader = asyncio.create_task(read())
        await seen.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await asyncio.wait_for(gateway.has_ended.wait(), 60)


async def test_timeout_is_a_deadline() -> None:
    gateway = ScriptedGateway([accepted(), asyncio.Event()])
    async with connected(gateway) as client:
        with pytest.raises(ClientError) as caught:
            await events_of(client, timeout_s=0.2)
    assert caught.value.status == "DEADLINE_EXCEEDED"


async def test_stream_without_an_end_is_an_error() -> None:
    async with connected(ScriptedGateway([accepted(), delta("a")])) as client:
        with pytest.raises(ClientError, match="without saying how"):
            await events_of(client)


@pytest.mark.parametrize("method", ["generate", "resume"])
@pytest.mark.parametrize("how", ["failed", "deadline", "cut", "silent"])
async def test_nothing_behind_the_finish_is_a_failure(method: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may die between the two. The answer is whole."""
    if how == "silent":
        monkeypatch.setattr("client.client._STATUS_WAIT_S", 0.05)
    behind = {"failed": UnavailableError("gone"), "deadline": DeadlineExceededError("late")}.get(how, asyncio.Event())
    gateway = ScriptedGateway([accepted(), delta("a"), finished(), behind])
    events: list[Event] = []
    async with serving(gateway) as direct:
        link = BreakableLink(direct)
        async with link.open() as address, Client(address) as client:
            async for event in client.generate(PROMPT) if method == "generate" else client.resume("r1"):
                events.append(event)
                if how == "cut" and isinstance(event, Finished):
                    link.cut()
    assert [type(event) for event in events] == [Accepted, Delta, Finished]


async def test_a_whole_answer_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its reader takes over the finish, its gateway may end the call in its own time."""
    monkeypatch.setattr("client.client._STATUS_WAIT_S", 60.0)
    gate = asyncio.Event()
    gateway = ScriptedGateway([accepted(), finished(), gate])
    async with connected(gateway) as client:
        async for event in client.generate(PROMPT):
            if isinstance(event, Finished):
                asyncio.get_running_loop().call_later(0.1, gate.set)
        await asyncio.wait_for(gateway.has_ended.wait(), 60)
    assert not gateway.was_cancelled


async def test_events_of_a_newer_server_are_skipped() -> None:
    async with connected(ScriptedGateway([inference_pb2.GenerateResponse(), finished()])) as client:
        assert len(await events_of(client)) == 1


@pytest.mark.parametrize(
    ("scripts", "max_retries", "timeout_s", "sleeps", "succeeds"),
    [
        ([[BUSY], [BUSY], [accepted(), finished()]], 2, None, [1.25, 1.25], True),
        ([[BUSY], [BUSY], [BUSY]], 2, None, [1.25, 1.25], False),
        ([[BUSY]], 0, None, [], False),
        ([[UnavailableError("no wait is named")]], 2, None, [], False),
        ([[accepted(), BUSY]], 2, None, [], False),
        ([[LimitExceededError("long", retry_after_s=31.0)]], 2, None, [], False),
        ([[BUSY], [BUSY]], 2, 2.0, [1.25], False),
    ],
)
async def test_retries_only_where_the_server_names_a_wait_and_nothing_was_received(
    scripts: list[list[object]], max_retries: int, timeout_s: float | None, sleeps: list[float], succeeds: bool
) -> None:
    clock = FakeClock()
    gateway = ScriptedGateway(*scripts)  # type: ignore[arg-type]
    options = ClientOptions(max_retries=max_retries)
    async with connected(
        gateway, lambda address: Client(address, options=options, clock=clock, sleep=clock.sleep)
    ) as client:
        if succeeds:
            assert len([event async for event in client.generate(PROMPT, timeout_s=timeout_s)]) == 2
        else:
            with pytest.raises(ClientError):
                async for _ in client.generate(PROMPT, timeout_s=timeout_s):
                    pass
    assert clock.sleeps == sleeps
    assert not gateway.scripts


async def test_unary_calls_are_retried_too() -> None:
    clock = FakeClock()
    gateway = ScriptedGateway([BUSY], [inference_pb2.CountTokensResponse(num_tokens=1)])
    async with connected(
        gateway, lambda address: Client(address, options=ClientOptions(max_retries=1), clock=clock, sleep=clock.sleep)
    ) as client:
        assert (await client.count_tokens(PROMPT)).num_tokens == 1
    assert clock.sleeps == [1.25]


async def test_health() -> None:
    servicer = health.aio.HealthServicer()
    await servicer.set("inference.v1.Inference", health_pb2.HealthCheckResponse.NOT_SERVING)
    async with connected(
        ScriptedGateway(), register=lambda server: health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    ) as client:
        assert await client.health() == "NOT_SERVING"
        assert await client.health("") == "SERVING"
        assert await client.health("nobody") == "SERVICE_UNKNOWN"
