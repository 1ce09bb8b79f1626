"""Messages between gateway and worker to values and back."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from common.types import (
    BlockUsage,
    ClaimRef,
    FinishReason,
    ModelDescription,
    ModelLimits,
    PositionLogprobs,
    Reason,
    SamplingParams,
    TokenLogprob,
)
from common.window import Window
from gateway.placement.worker import Submission, TokensEvent
from protos.inference.v1 import types_pb2, worker_pb2


class ProtocolError(Exception):
    """A worker said something that has no meaning; the message says what."""


def encode_submit(submission: Submission, wire_id: str) -> worker_pb2.SessionCommand:
    """A submit under the session's own id for it."""
    submit = worker_pb2.Submit(
        request_id=wire_id,
        attempt=submission.attempt,
        prompt_token_ids=submission.prompt_token_ids,
        output_token_ids=submission.output_token_ids,
        sampling=_encode_sampling(submission.sampling),
        band=types_pb2.Band.ValueType(submission.band),
        cache_salt=submission.cache_salt,
        timeout_s=submission.timeout_s,
        may_hand_back=submission.may_hand_back,
    )
    return worker_pb2.SessionCommand(submit=submit)


def _encode_sampling(sampling: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        ignore_eos=sampling.ignore_eos,
        kv_window_tokens=sampling.kv_window_tokens,
        kv_sink_tokens=sampling.kv_sink_tokens or None,
    )


def decode_limits(message: worker_pb2.ModelLimits) -> ModelLimits:
    """What the worker's model and pool allow. Raises ProtocolError if a number is 0 or the name empty."""
    limits = ModelLimits(
        model=message.model,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        windows=tuple(Window(it.tokens, it.sinks) if it.tokens else None for it in message.windows) or (None,),
        max_chunk_tokens=message.max_chunk_tokens,
    )
    numbers = (limits.context_length, limits.vocab_size, limits.block_size, limits.num_blocks, limits.max_num_seqs)
    if not limits.model or 0 in numbers:
        raise ProtocolError(f"a worker's limits need a name and positive numbers: {limits}")
    return limits


def decode_description(raw: bytes) -> ModelDescription:
    """The joined chunks of Describe. Raises ProtocolError if they make no sense."""
    try:
        message = worker_pb2.Description.FromString(raw)
    except DecodeError as error:
        raise ProtocolError(f"the description cannot be decoded: {error}") from error
    return ModelDescription(
        limits=decode_limits(message.limits),
        tokenizer_json=message.tokenizer_json,
        chat_template=message.chat_template,
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        add_bos_token=message.add_bos_token,
        bos_token=message.bos_token,
        eos_token=message.eos_token,
    )


def decode_finish_reason(value: int) -> FinishReason | None:
    """None while the request goes on. Raises ProtocolError for a reason that is not known here."""
    try:
        return FinishReason(value) if value else None
    except ValueError as error:
        raise ProtocolError(f"finish reason {value} is not known") from error


def decode_output(output: worker_pb2.RequestOutput, request_id: str) -> TokensEvent:
    """A request's part of a step. Raises ProtocolError for a finish reason that is not known here."""
    logprobs, finish_reason = output.logprobs, output.finish_reason
    return TokensEvent(
        request_id,
        output.attempt,
        tuple(output.token_ids),
        tuple(map(decode_logprobs, logprobs)) if logprobs else (),
        decode_finish_reason(finish_reason) if finish_reason else None,
        output.cached_prompt_tokens,
    )


def decode_logprobs(message: types_pb2.PositionLogprobs) -> PositionLogprobs:
    """Log probabilities of one position."""
    sampled = TokenLogprob(message.sampled.token_id, message.sampled.logprob)
    return PositionLogprobs(sampled, tuple(TokenLogprob(it.token_id, it.logprob) for it in message.top))


def decode_usage(message: worker_pb2.BlockUsage, accounted: tuple[ClaimRef, ...]) -> BlockUsage:
    """The worker's numbers, with the claims under the fleet's ids."""
    return BlockUsage(
        seq=message.seq,
        empty=message.empty,
        cached=message.cached,
        referenced=message.referenced,
        swapping=message.swapping,
        running=message.running,
        waiting=message.waiting,
        free_slots=message.free_slots,
        accounted=accounted,
    )


def decode_reason(value: int) -> Reason:
    """The reason of a refusal; one that is not known here is INTERNAL."""
    try:
        return Reason(value)
    except ValueError:
        return Reason.INTERNAL
