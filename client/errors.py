"""What goes wrong in a call, read from a gRPC status and its rich details."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from common.errors import FieldViolation, QuotaViolation
from common.types import Reason

DETAILS_KEY = "grpc-status-details-bin"


class ClientError(Exception):
    """A call that failed.

    `status` is the name of the gRPC status code; `reason` is the server's own word, None if it gave none (the failure
    is then one of the connection, or of something between here and the server).
    `retry_after_s` is set if, and only if, the server says that a retry after that many seconds can succeed.
    """

    def __init__(
        self,
        status: str,
        message: str,
        *,
        reason: Reason | None = None,
        retry_after_s: float | None = None,
        fields: Iterable[FieldViolation] = (),
        quotas: Iterable[QuotaViolation] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.fields = tuple(fields)
        self.quotas = tuple(quotas)

    def __str__(self) -> str:
        name = self.status if self.reason is None else f"{self.status}/{self.reason.name}"
        return f"{name}: {self.message}"

    def __repr__(self) -> str:
        return f"ClientError({self})"


def from_rpc_error(error: grpc.aio.AioRpcError) -> ClientError:
    """The error of a call with what its details say; details that cannot be read are left out."""
    status = error.code().name
    if error.code() is grpc.StatusCode.CANCELLED:
        # Nobody here cancelled it, that is another exception: the library at the other end says this, and no more, of
        # calls that come while a server leaves.
        status = grpc.StatusCode.UNAVAILABLE.name
    message = error.details() or "the server gave no message"
    rich = status_pb2.Status()
    for key, value in error.trailing_metadata():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                rich.ParseFromString(value)
            except DecodeError:
                return ClientError(status, message)
    info, bad, quota, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.QuotaFailure(),
        error_details_pb2.RetryInfo(),
    )
    retry_after_s = None
    for detail in rich.details:
        try:
            if detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
            else:
                detail.Unpack(info) or detail.Unpack(bad) or detail.Unpack(quota)
        except DecodeError:
            continue
    return ClientError(
        status,
        message,
        reason=Reason.__members__.get(info.reason),
        retry_after_s=retry_after_s,
        fields=[FieldViolation(each.field, each.description) for each in bad.field_violations],
        quotas=[QuotaViolation(each.subject, each.description) for each in quota.violations],
    )
