"""Messages of worker.proto to the engine's words and back; what model and pool allow is the engine's to check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequestError
from common.types import Band, BlockUsage, ModelDescription, ModelLimits, PositionLogprobs, Reason, SamplingParams
from protos.inference.v1 import types_pb2, worker_pb2
from worker.engine.events import HandedBack, RequestOutput, RequestRejected

DESCRIBE_CHUNK_BYTES = 1 << 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
_RANGES: dict[str, tuple[float, float]] = {  # both ends allowed; a NaN is in none
    "temperature": (0, 100),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-45, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, 20),
    "kv_window_tokens": (1, 2**31 - 1),
    "kv_sink_tokens": (0, 2**31 - 1),
}
_BIAS_RANGE = (-100, 100)

MAX_ID_BYTES = 512
"""A request id is a tenant's and a client's, at most 64 and 128 characters; this is room to spare."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What the engine's submit takes; not range-checked."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    band: Band
    cache_salt: str
    timeout_s: float | None
    may_hand_back: bool


def submission_from_proto(message: worker_pb2.Submit, limits: ModelLimits) -> Submission:
    """Raises InvalidRequestError where the domain's types have no room for what the message says."""
    if not 1 <= len(message.request_id.encode()) <= MAX_ID_BYTES:
        raise InvalidRequestError.of_field("request_id", f"must have 1 to {MAX_ID_BYTES} bytes")
    if message.attempt < 1:
        raise InvalidRequestError.of_field("attempt", "must be at least 1")
    if not message.timeout_s >= 0:  # a NaN is not
        raise InvalidRequestError.of_field("timeout_s", f"{message.timeout_s}; must be at least 0")
    return Submission(
        request_id=message.request_id,
        attempt=message.attempt,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=sampling_from_proto(message.sampling, default_max_tokens=limits.context_length),
        band=_band_from_proto(message.band),
        cache_salt=message.cache_salt,
        timeout_s=message.timeout_s or None,
        may_hand_back=message.may_hand_back,
    )


def sampling_from_proto(message: types_pb2.SamplingParams, *, default_max_tokens: int) -> SamplingParams:
    """Checks the ranges and fills in the defaults that types.proto names; a missing seed becomes 0.

    Raises InvalidRequestError: the gateway has checked all this, but a worker believes nobody.
    """
    _check_ranges(message)

    def given(name: str, default: float) -> Any:
        return getattr(message, name) if message.HasField(name) else default  # type: ignore[arg-type]

    return SamplingParams(
        seed=message.seed,
        max_tokens=given("max_tokens", default_max_tokens),
        temperature=given("temperature", 1.0),
        top_k=message.top_k,
        top_p=given("top_p", 1.0),
        min_p=message.min_p,
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        ignore_eos=message.ignore_eos,
        kv_window_tokens=message.kv_window_tokens if message.HasField("kv_window_tokens") else None,
        kv_sink_tokens=message.kv_sink_tokens,
    )


def _check_ranges(message: types_pb2.SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(message, name)
        if message.HasField(name) and not low <= value <= high:  # type: ignore[arg-type]
            raise InvalidRequestError.of_field(f"sampling.{name}", f"{value}; allowed are {low} to {high}")
    for name, most in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("logit_bias", MAX_LOGIT_BIAS)):
        count = len(getattr(message, name))
        if count > most:
            raise InvalidRequestError.of_field(f"sampling.{name}", f"{count} entries; at most {most} are allowed")
    low, high = _BIAS_RANGE
    for token_id, bias in message.logit_bias.items():
        if not low <= bias <= high:
            what = f"{bias} for token {token_id}; allowed are {low} to {high}"
            raise InvalidRequestError.of_field("sampling.logit_bias", what)


def _band_from_proto(value: int) -> Band:
    if value == types_pb2.BAND_UNSPECIFIED:
        return Band.NORMAL
    try:
        return Band(value)
    except ValueError:
        allowed = ", ".join(band.name for band in Band)
        raise InvalidRequestError.of_field("band", f"{value} is none of {allowed}") from None


def output_to_proto(output: RequestOutput) -> worker_pb2.RequestOutput:
    """New tokens of one request."""
    return worker_pb2.RequestOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        token_ids=output.token_ids,
        logprobs=[_logprobs_to_proto(position) for position in output.logprobs],
        finish_reason=output.finish_reason.value if output.finish_reason else 0,  # type: ignore[arg-type]
        cached_prompt_tokens=output.cached_prompt_tokens,
    )


def _logprobs_to_proto(position: PositionLogprobs) -> types_pb2.PositionLogprobs:
    def entry(token_id: int, logprob: float) -> types_pb2.TokenLogprob:
        return types_pb2.TokenLogprob(token_id=token_id, logprob=logprob)

    return types_pb2.PositionLogprobs(
        sampled=entry(position.sampled.token_id, position.sampled.logprob),
        top=[entry(each.token_id, each.logprob) for each in position.top],
    )


def rejected_to_proto(rejected: RequestRejected) -> worker_pb2.Rejected:
    """A submit that was not taken, or a request that failed."""
    return worker_pb2.Rejected(
        request_id=rejected.request_id,
        attempt=rejected.attempt,
        reason=reason_to_proto(rejected.reason),
        message=rejected.message,
    )


def handed_back_to_proto(handed_back: HandedBack) -> worker_pb2.HandedBack:
    """A request for another worker."""
    return worker_pb2.HandedBack(request_id=handed_back.request_id, attempt=handed_back.attempt)


def reason_to_proto(reason: Reason) -> types_pb2.Reason.ValueType:
    """The same name on the wire."""
    return types_pb2.Reason.Value(f"REASON_{reason.name}")


def usage_to_proto(usage: BlockUsage) -> worker_pb2.BlockUsage:
    """Pool and slots at one moment."""
    return worker_pb2.BlockUsage(
        seq=usage.seq,
        empty=usage.empty,
        cached=usage.cached,
        referenced=usage.referenced,
        swapping=usage.swapping,
        running=usage.running,
        waiting=usage.waiting,
        free_slots=usage.free_slots,
        accounted=[
            worker_pb2.ClaimRef(request_id=claim.request_id, attempt=claim.attempt) for claim in usage.accounted
        ],
    )


def limits_to_proto(limits: ModelLimits) -> worker_pb2.ModelLimits:
    """What model and pool allow."""
    return worker_pb2.ModelLimits(
        model=limits.model,
        context_length=limits.context_length,
        vocab_size=limits.vocab_size,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_num_seqs=limits.max_num_seqs,
        windows=[
            worker_pb2.Window(tokens=window.num_tokens, sinks=window.num_sinks) if window else worker_pb2.Window()
            for window in limits.windows
        ],
        max_chunk_tokens=limits.max_chunk_tokens,
    )


def description_to_chunks(description: ModelDescription) -> Iterable[bytes]:
    """The serialized Description in parts of at most 1 MiB."""
    message = worker_pb2.Description(
        limits=limits_to_proto(description.limits),
        tokenizer_json=description.tokenizer_json,
        chat_template=description.chat_template,
        eos_token_ids=description.eos_token_ids,
        bos_token_id=description.bos_token_id,
        add_bos_token=description.add_bos_token,
        bos_token=description.bos_token,
        eos_token=description.eos_token,
    )
    raw = message.SerializeToString()
    for start in range(0, len(raw), DESCRIBE_CHUNK_BYTES):
        yield raw[start : start + DESCRIBE_CHUNK_BYTES]
