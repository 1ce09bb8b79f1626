"""One tree of errors; each class is a gRPC status, each instance carries a reason and what the client may know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from common.types import Reason


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """Which field of a request is wrong, and what is allowed."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """Which limit of which subject refused a request."""

    subject: str  # e.g. "tenant:acme"
    description: str


class TidegateError(Exception):
    """Root of all errors that may reach a client.

    The message must not contain prompts, other tenants' names or stack traces.
    `retry_after_s` is set if, and only if, a retry after that many seconds can succeed. `budget`: what is left of the
    caller's limits, by their names, as far as it is known.
    """

    status: ClassVar[str] = "INTERNAL"  # name of a grpc.StatusCode
    default_reason: ClassVar[Reason] = Reason.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        retry_after_s: float | None = None,
        fields: Sequence[FieldViolation] = (),
        quotas: Sequence[QuotaViolation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason is not None else self.default_reason
        self.retry_after_s = retry_after_s
        self.fields = tuple(fields)
        self.quotas = tuple(quotas)
        self.budget: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reason.name}: {self.message})"


class InternalError(TidegateError):
    """A fault of the server."""


class InvalidRequestError(TidegateError):
    """Malformed, out of range, or can never fit; the message says what was wrong and what is allowed."""

    status = "INVALID_ARGUMENT"
    default_reason = Reason.INVALID_PARAMETER

    @classmethod
    def of_field(cls, name: str, description: str, reason: Reason = Reason.INVALID_PARAMETER) -> InvalidRequestError:
        """An error about one field: `name` as on the wire, `description` what it is and what is allowed."""
        return cls(f"{name}: {description}", reason=reason, fields=[FieldViolation(name, description)])


class UnauthenticatedError(TidegateError):
    """No credential, or one that nobody has."""

    status = "UNAUTHENTICATED"
    default_reason = Reason.UNKNOWN_CREDENTIAL


class NotAllowedError(TidegateError):
    """The credential is good and does not allow this."""

    status = "PERMISSION_DENIED"
    default_reason = Reason.NOT_ALLOWED


class NotFoundError(TidegateError):
    """There is no such model or request."""

    status = "NOT_FOUND"
    default_reason = Reason.REQUEST_NOT_FOUND


class DuplicateRequestError(TidegateError):
    """A live request of the tenant has this id."""

    status = "ALREADY_EXISTS"
    default_reason = Reason.DUPLICATE_REQUEST_ID


class LimitExceededError(TidegateError):
    """Over a limit of the tenant or of the queue."""

    status = "RESOURCE_EXHAUSTED"
    default_reason = Reason.QUEUE_FULL


class DeadlineExceededError(TidegateError):
    """The client's own deadline passed."""

    status = "DEADLINE_EXCEEDED"
    default_reason = Reason.DEADLINE


class UnavailableError(TidegateError):
    """Nobody can serve this now."""

    status = "UNAVAILABLE"
    default_reason = Reason.NO_WORKERS


class SlowConsumerError(TidegateError):
    """The client reads too slowly, past the bound."""

    status = "ABORTED"
    default_reason = Reason.SLOW_CONSUMER
