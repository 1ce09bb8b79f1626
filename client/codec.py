"""Between the client's types and the wire's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields

from client.errors import ClientError
from client.types import (
    Accepted,
    Chat,
    Completion,
    Delta,
    Event,
    Finished,
    PositionLogprobs,
    Prompt,
    Sampling,
    Text,
    Timing,
    TokenLogprob,
)
from common.errors import FieldViolation
from common.types import Band, FinishReason, Reason, Usage
from protos.inference.v1 import inference_pb2, types_pb2


def to_generate_request(
    prompt: Prompt,
    sampling: Sampling,
    *,
    model: str,
    request_id: str,
    band: Band | None,
    return_token_ids: bool,
    resumable: bool = False,
    idempotency_key: str = "",
) -> inference_pb2.GenerateRequest:
    """Raises ClientError (INVALID_ARGUMENT) if a value does not fit its field on the wire."""
    request = inference_pb2.GenerateRequest(return_token_ids=return_token_ids, resumable=resumable)
    with _fitting("idempotency_key"):
        request.idempotency_key = idempotency_key
    with _fitting("request_id"):
        request.request_id = request_id
    with _fitting("model"):
        request.model = model
    if band is not None:
        request.band = types_pb2.Band.ValueType(band)
    if isinstance(prompt, Chat):
        request.chat.CopyFrom(to_chat(prompt))
    elif isinstance(prompt, Text):
        with _fitting("text"):
            request.text = prompt.text
    else:
        request.tokens.SetInParent()
        with _fitting("tokens.token_ids"):
            request.tokens.token_ids.extend(prompt.token_ids)
    request.sampling.CopyFrom(to_sampling(sampling))
    return request


def to_count_request(prompt: Chat | Text, model: str) -> inference_pb2.CountTokensRequest:
    """Raises ClientError (INVALID_ARGUMENT) if a value does not fit its field on the wire."""
    request = inference_pb2.CountTokensRequest()
    with _fitting("model"):
        request.model = model
    if isinstance(prompt, Chat):
        request.chat.CopyFrom(to_chat(prompt))
    else:
        with _fitting("text"):
            request.text = prompt.text
    return request


def to_chat(chat: Chat) -> inference_pb2.ChatPrompt:
    """A conversation on the wire; one without messages is still a conversation."""
    message = inference_pb2.ChatPrompt()
    for index, each in enumerate(chat.messages):
        with _fitting(f"chat.messages[{index}]"):
            message.messages.add(role=each.role, content=each.content)
    return message


def to_sampling(sampling: Sampling) -> types_pb2.SamplingParams:
    """Fields that are None stay unset."""
    message = types_pb2.SamplingParams()
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if value is not None:
            with _fitting(f"sampling.{field.name}"):
                message.MergeFrom(types_pb2.SamplingParams(**{field.name: value}))
    return message


@contextmanager
def _fitting(name: str) -> Iterator[None]:
    """Names the field whose value protobuf refuses: it does not say itself."""
    try:
        yield
    except (TypeError, ValueError) as error:
        violation = FieldViolation(name, f"it does not fit its field on the wire: {error}")
        raise ClientError(
            "INVALID_ARGUMENT",
            f"{violation.field}: {violation.description}",
            reason=Reason.INVALID_PARAMETER,
            fields=[violation],
        ) from error


def to_event(response: inference_pb2.GenerateResponse) -> Event | None:
    """None for an event that a newer server knows and this client does not."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return Delta(delta.text, tuple(delta.token_ids), to_logprobs(delta.logprobs), delta.offset)
    if kind == "accepted":
        accepted = response.accepted
        return Accepted(accepted.request_id, accepted.model, accepted.prompt_tokens, accepted.seed)
    if kind == "finished":
        finished = response.finished
        return Finished(FinishReason(finished.reason), to_usage(finished.usage), to_timing(finished.timing))
    return None


def to_completion(response: inference_pb2.CompleteResponse) -> Completion:
    """A whole answer."""
    return Completion(
        request_id=response.request_id,
        model=response.model,
        text=response.text,
        reason=FinishReason(response.reason),
        usage=to_usage(response.usage),
        timing=to_timing(response.timing),
        seed=response.seed,
        token_ids=tuple(response.token_ids),
        logprobs=to_logprobs(response.logprobs),
    )


def to_usage(usage: types_pb2.Usage) -> Usage:
    """What a request used, in tokens."""
    return Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens)


def to_timing(timing: inference_pb2.Timing) -> Timing:
    """Durations in seconds."""
    return Timing(timing.queue_s, timing.ttft_s, timing.total_s)


def to_logprobs(positions: Iterable[types_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    """One entry for each token."""
    return tuple(
        PositionLogprobs(_token_logprob(each.sampled), tuple(map(_token_logprob, each.top))) for each in positions
    )


def _token_logprob(entry: types_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.text)
