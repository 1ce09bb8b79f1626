from __future__ import annotations

from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    NotAllowedError,
    NotFoundError,
    QuotaViolation,
    SlowConsumerError,
    TidegateError,
    UnauthenticatedError,
    UnavailableError,
)
from common.rpc.status import to_rich_status
from common.types import Reason
from protos.inference.v1 import types_pb2


def details(status: status_pb2.Status) -> dict[str, Any]:
    found = {}
    for packed in status.details:
        kind = packed.type_url.rpartition(".")[2]
        found[kind] = getattr(error_details_pb2, kind)()
        packed.Unpack(found[kind])
    return found


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (InternalError, code_pb2.INTERNAL),
        (InvalidRequestError, code_pb2.INVALID_ARGUMENT),
        (UnauthenticatedError, code_pb2.UNAUTHENTICATED),
        (NotAllowedError, code_pb2.PERMISSION_DENIED),
        (NotFoundError, code_pb2.NOT_FOUND),
        (DuplicateRequestError, code_pb2.ALREADY_EXISTS),
        (LimitExceededError, code_pb2.RESOURCE_EXHAUSTED),
        (DeadlineExceededError, code_pb2.DEADLINE_EXCEEDED),
        (UnavailableError, code_pb2.UNAVAILABLE),
        (SlowConsumerError, code_pb2.ABORTED),
    ],
)
def test_every_error_has_its_code_and_reason(kind: type[TidegateError], code: int) -> None:
    status = to_rich_status(kind("what happened"))
    assert (status.code, status.message) == (code, "what happened")
    assert details(status) == {
        "ErrorInfo": error_details_pb2.ErrorInfo(reason=kind.default_reason.name, domain="tidegate")
    }


def test_details_are_there_if_the_error_has_them() -> None:
    error = LimitExceededError(
        "over",
        reason=Reason.TOKEN_RATE,
        retry_after_s=2.25,
        fields=[FieldViolation("f", "d")],
        quotas=[QuotaViolation("tenant:a", "1000 per minute")],
    )
    found = details(to_rich_status(error))
    assert found["ErrorInfo"].reason == "TOKEN_RATE"
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == 2250
    assert found["BadRequest"].field_violations[0].field == "f"
    assert found["QuotaFailure"].violations[0].subject == "tenant:a"


@pytest.mark.parametrize(("retry_after_s", "milliseconds"), [(0.0, 0), (-1.0, 0), (86400.5, 86400500)])
def test_retry_delays_are_never_negative(retry_after_s: float, milliseconds: int) -> None:
    found = details(to_rich_status(UnavailableError("x", retry_after_s=retry_after_s)))
    assert found["RetryInfo"].retry_delay.ToMilliseconds() == milliseconds


def test_the_longest_error_fits_into_a_trailer() -> None:
    long = "ü" * 100_000
    fields = [FieldViolation(long, long)] * 100
    status = to_rich_status(InvalidRequestError(long, fields=fields, quotas=[QuotaViolation(long, long)] * 100))
    assert status.ByteSize() < 16_000
    assert len(status.message) == 400
    assert to_rich_status(InvalidRequestError.of_field("prompt", "p" * 200)).ByteSize() < 1024


def test_reasons_are_the_wires() -> None:
    wire = {name.removeprefix("REASON_"): number for name, number in types_pb2.Reason.items() if number}
    assert {reason.name: reason.value for reason in Reason} == wire
