"""The one place where an error becomes a gRPC status with rich details."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import TidegateError

ERROR_DOMAIN = "tidegate"
"""Domain of ErrorInfo in every error."""

# Trailers have a small budget in HTTP/2 (8 KiB by default for all of them); base64 adds a third.
_MAX_TEXT = 400
_MAX_VIOLATIONS = 4


def budget_metadata(budget: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """What is left of the caller's limits, as trailing metadata; a limit that it does not have is not there."""
    return tuple((f"tidegate-remaining-{name}", str(number)) for name, number in budget.items())


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def to_rich_status(error: TidegateError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error: ErrorInfo always; BadRequest, QuotaFailure and RetryInfo if it has them."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=_clip(error.message))

    def add(detail: Message) -> None:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)

    add(error_details_pb2.ErrorInfo(reason=error.reason.name, domain=ERROR_DOMAIN))
    if error.fields:
        violation = error_details_pb2.BadRequest.FieldViolation
        violations = [
            violation(field=_clip(f.field), description=_clip(f.description)) for f in error.fields[:_MAX_VIOLATIONS]
        ]
        add(error_details_pb2.BadRequest(field_violations=violations))
    if error.quotas:
        quota = error_details_pb2.QuotaFailure.Violation
        quotas = [
            quota(subject=_clip(q.subject), description=_clip(q.description)) for q in error.quotas[:_MAX_VIOLATIONS]
        ]
        add(error_details_pb2.QuotaFailure(violations=quotas))
    if error.retry_after_s is not None:
        nanos = max(0, round(error.retry_after_s * 1e9))
        delay = Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
        add(error_details_pb2.RetryInfo(retry_delay=delay))
    return status
