from __future__ import annotations

import contextlib
import math

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.types import (
    Band,
    BlockUsage,
    ClaimRef,
    FinishReason,
    ModelDescription,
    ModelLimits,
    PositionLogprobs,
    Reason,
    TokenLogprob,
)
from protos.inference.v1 import types_pb2, worker_pb2
from worker.engine.events import RequestOutput, RequestRejected
from worker.engine.validation import check_submission
from worker.rpc import codec

LIMITS = ModelLimits("m", context_length=128, vocab_size=100, block_size=8, num_blocks=20, max_num_seqs=4)


def submit(**fields: object) -> worker_pb2.Submit:
    return worker_pb2.Submit(**{"request_id": "acme/1", "attempt": 1, "prompt_token_ids": [1, 2]} | fields)  # type: ignore[arg-type]


def check(message: worker_pb2.Submit) -> None:
    submission = codec.submission_from_proto(message, LIMITS)
    max_kv_tokens = LIMITS.num_blocks * LIMITS.block_size
    check_submission(
        LIMITS, max_kv_tokens, submission.prompt_token_ids, submission.output_token_ids, submission.sampling
    )


def test_defaults_are_those_of_the_proto() -> None:
    sampling = codec.submission_from_proto(submit(), LIMITS).sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.logprobs, sampling.max_tokens) == (0, 0.0, None, 128)


def test_a_bound_in_time_is_positive_or_none() -> None:
    assert codec.submission_from_proto(submit(), LIMITS).timeout_s is None
    assert codec.submission_from_proto(submit(timeout_s=1.5), LIMITS).timeout_s == 1.5
    for timeout_s in (-1.0, float("nan")):
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            codec.submission_from_proto(submit(timeout_s=timeout_s), LIMITS)


def test_given_values_arrive_even_where_they_are_zero() -> None:
    message = submit(
        sampling=types_pb2.SamplingParams(temperature=0, top_p=0, logprobs=0, max_tokens=3, seed=2**64 - 1),
        band=types_pb2.BAND_LOW,
        output_token_ids=[5],
        cache_salt="s",
    )
    submission = codec.submission_from_proto(message, LIMITS)
    sampling = submission.sampling
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (0.0, 0.0, 0)
    assert (sampling.max_tokens, sampling.seed) == (3, 2**64 - 1)
    assert (submission.band, submission.output_token_ids, submission.cache_salt) == (Band.LOW, (5,), "s")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("request_id", submit(request_id="")),
        ("request_id", submit(request_id="x" * 513)),
        ("attempt", submit(attempt=0)),
        ("band", submit(band=99)),
    ],
)
def test_what_the_domain_has_no_room_for_is_refused(field: str, message: worker_pb2.Submit) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.submission_from_proto(message, LIMITS)
    assert caught.value.fields[0].field == field


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (types_pb2.SamplingParams(temperature=math.nan), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(temperature=-1), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(temperature=math.inf), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(top_p=1.5), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(top_k=-1), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(repetition_penalty=0), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(logprobs=21), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(max_tokens=0), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(min_tokens=9, max_tokens=8), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(stop_token_ids=[1] * 65), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(logit_bias={1: math.inf}), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(logit_bias={1: -101}), Reason.INVALID_PARAMETER),
        (types_pb2.SamplingParams(logit_bias={100: 1}), Reason.INVALID_TOKEN_ID),
        (types_pb2.SamplingParams(stop_token_ids=[2**32 - 1]), Reason.INVALID_TOKEN_ID),
    ],
)
def test_bad_sampling_is_refused_by_codec_or_engine(sampling: types_pb2.SamplingParams, reason: Reason) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(submit(sampling=sampling))
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    "sampling",
    [
        types_pb2.SamplingParams(temperature=1e-6),
        types_pb2.SamplingParams(top_p=0, top_k=2**31 - 1, min_p=1),
        types_pb2.SamplingParams(repetition_penalty=10, presence_penalty=-2, frequency_penalty=2, logprobs=20),
        types_pb2.SamplingParams(logit_bias={0: -100, 99: 100}, stop_token_ids=[99]),
    ],
)
def test_the_ends_of_every_range_are_allowed(sampling: types_pb2.SamplingParams) -> None:
    check(submit(sampling=sampling))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_decodable_bytes_are_taken_or_refused(raw: bytes) -> None:
    message = worker_pb2.Submit()
    with contextlib.suppress(DecodeError, UnicodeDecodeError):
        message.ParseFromString(raw)
    with contextlib.suppress(InvalidRequestError):
        check(message)


def test_outputs_carry_tokens_logprobs_and_the_end() -> None:
    position = PositionLogprobs(TokenLogprob(5, -0.5), (TokenLogprob(5, -0.5), TokenLogprob(6, -1.5)))
    message = codec.output_to_proto(RequestOutput("r", 2, (5,), (position,), FinishReason.STOP, 16))
    assert (message.request_id, message.attempt, list(message.token_ids)) == ("r", 2, [5])
    assert [entry.token_id for entry in message.logprobs[0].top] == [5, 6]
    assert (message.finish_reason, message.cached_prompt_tokens) == (types_pb2.FINISH_REASON_STOP, 16)
    unfinished = codec.output_to_proto(RequestOutput("r", 2, (5,), (), None, 0))
    assert unfinished.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_its_name_on_the_wire(reason: Reason) -> None:
    message = codec.rejected_to_proto(RequestRejected("r", 1, reason, "why"))
    assert types_pb2.Reason.Name(message.reason) == f"REASON_{reason.name}"


def test_usage_keeps_every_number() -> None:
    usage = BlockUsage(1, 2, 3, 4, 5, 6, 7, 8, accounted=(ClaimRef("r", 9),))
    message = codec.usage_to_proto(usage)
    numbers = (message.seq, message.empty, message.cached, message.referenced, message.swapping)
    assert numbers == (1, 2, 3, 4, 5)
    assert (message.running, message.waiting, message.free_slots) == (6, 7, 8)
    assert [(claim.request_id, claim.attempt) for claim in message.accounted] == [("r", 9)]


def test_a_description_survives_being_cut_into_chunks() -> None:
    tokenizer = bytes(range(256)) * (10 * 1024 + 1)  # 2.5 MiB
    description = ModelDescription(LIMITS, tokenizer, "{{ x }}", (3, 4), None, False, "", "</s>")
    chunks = list(codec.description_to_chunks(description))
    assert [len(chunk) for chunk in chunks[:-1]] == [codec.DESCRIBE_CHUNK_BYTES] * (len(chunks) - 1)
    assert 0 < len(chunks[-1]) <= codec.DESCRIBE_CHUNK_BYTES
    joined = worker_pb2.Description.FromString(b"".join(chunks))
    assert joined.tokenizer_json == tokenizer
    assert not joined.HasField("bos_token_id")
    assert list(joined.eos_token_ids) == [3, 4]
