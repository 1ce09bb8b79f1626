"""Clients' messages to values and back; no checks but that the bytes mean something."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, assert_never

from common.errors import InvalidRequestError
from common.types import Band, PositionLogprobs, TokenLogprob, Usage
from gateway.answer import Accepted, Event, Finished, TextDelta
from gateway.requests import ChatPrompt, GenerateCall, Prompt, SamplingWish, TextPrompt, TokenPrompt
from protos.inference.v1 import inference_pb2, types_pb2

TokenBytes = Callable[[int], bytes]


def decode_generate(message: inference_pb2.GenerateRequest) -> GenerateCall:
    """A wish for an answer. Raises InvalidRequestError for a band that does not exist."""
    return GenerateCall(
        request_id=message.request_id,
        model=message.model,
        prompt=decode_prompt(message),
        sampling=_decode_sampling(message.sampling),
        band=_decode_band(message.band),
        return_token_ids=message.return_token_ids,
        is_resumable=message.resumable,
        idempotency_key=message.idempotency_key,
    )


def decode_prompt(message: inference_pb2.GenerateRequest | inference_pb2.CountTokensRequest) -> Prompt | None:
    """The prompt that is set, if any."""
    match message.WhichOneof("prompt"):
        case "chat":
            return ChatPrompt(tuple((turn.role, turn.content) for turn in message.chat.messages))
        case "text":
            return TextPrompt(message.text)
        case "tokens" if isinstance(message, inference_pb2.GenerateRequest):
            return TokenPrompt(tuple(message.tokens.token_ids))
        case _:
            return None


def _decode_sampling(message: types_pb2.SamplingParams) -> SamplingWish:
    # Most fields are not set: only those that are cost something.
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in ("stop_token_ids", "stop"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    return SamplingWish(**fields)


def _decode_band(value: int) -> Band | None:
    if value == types_pb2.BAND_UNSPECIFIED:
        return None
    try:
        return Band(value)
    except ValueError:
        allowed = ", ".join(f"{band.name} ({band.value})" for band in Band)
        raise InvalidRequestError.of_field("band", f"is {value}; allowed are {allowed}, or unspecified (0)") from None


def encode_event(event: Event, token_bytes: TokenBytes) -> inference_pb2.GenerateResponse:
    """One message of a stream. `token_bytes`: of the model that answers."""
    response = inference_pb2.GenerateResponse
    match event:
        case TextDelta():
            # Set field by field: half the time of the constructors, and this is done for every token.
            message = response()
            delta = message.delta
            delta.text, delta.offset = event.text, event.offset
            if event.token_ids:
                delta.token_ids.extend(event.token_ids)
            if event.logprobs:
                delta.logprobs.extend(encode_logprobs(event.logprobs, token_bytes))
            return message
        case Accepted(request):
            accepted = inference_pb2.Accepted(
                request_id=request.request_id,
                model=request.model.limits.model,
                prompt_tokens=len(request.prompt_token_ids),
                seed=request.sampling.seed,
            )
            return response(accepted=accepted)
        case Finished():
            finished = inference_pb2.Finished(
                reason=types_pb2.FinishReason.ValueType(event.reason),
                usage=_encode_usage(event.usage),
                timing=_encode_timing(event),
            )
            return response(finished=finished)
        case _:
            assert_never(event)


def encode_complete(
    accepted: Accepted, deltas: Iterable[TextDelta], finished: Finished
) -> inference_pb2.CompleteResponse:
    """A whole answer in one message."""
    request = accepted.request
    response = inference_pb2.CompleteResponse(
        request_id=request.request_id,
        model=request.model.limits.model,
        reason=types_pb2.FinishReason.ValueType(finished.reason),
        usage=_encode_usage(finished.usage),
        timing=_encode_timing(finished),
        seed=request.sampling.seed,
    )
    texts: list[str] = []
    for delta in deltas:
        texts.append(delta.text)
        response.token_ids.extend(delta.token_ids)
        response.logprobs.extend(encode_logprobs(delta.logprobs, request.model.text.token_bytes))
    response.text = "".join(texts)
    return response


def encode_logprobs(
    positions: Iterable[PositionLogprobs], token_bytes: TokenBytes
) -> Iterable[types_pb2.PositionLogprobs]:
    """Log probabilities with their tokens' bytes."""

    def encode(it: TokenLogprob) -> types_pb2.TokenLogprob:
        return types_pb2.TokenLogprob(token_id=it.token_id, logprob=it.logprob, text=token_bytes(it.token_id))

    for position in positions:
        yield types_pb2.PositionLogprobs(sampled=encode(position.sampled), top=map(encode, position.top))


def _encode_usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _encode_timing(finished: Finished) -> inference_pb2.Timing:
    return inference_pb2.Timing(queue_s=finished.queue_s, ttft_s=finished.ttft_s, total_s=finished.total_s)
