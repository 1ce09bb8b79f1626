"""The life of a request as a table of states, and its outcome, which is decided exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from common.errors import TidegateError
from common.types import FinishReason


class RequestState(Enum):
    """Where a request is; the last five are ends."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REJECTED = "rejected"
    FAILED = "failed"

    __hash__ = object.__hash__  # that of Enum is a function in Python, and every change of state looks up the table

    @property
    def is_terminal(self) -> bool:
        """Whether nothing follows."""
        return not TRANSITIONS[self]


_S = RequestState
TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        _S.RECEIVED: frozenset({_S.ADMITTED, _S.CANCELLED, _S.EXPIRED, _S.REJECTED, _S.FAILED}),
        _S.ADMITTED: frozenset({_S.QUEUED, _S.CANCELLED, _S.EXPIRED, _S.REJECTED, _S.FAILED}),
        _S.QUEUED: frozenset({_S.DISPATCHED, _S.CANCELLED, _S.EXPIRED, _S.REJECTED, _S.FAILED}),
        # Back to QUEUED when the worker is lost or had no room; COMPLETED when the first tokens are also the last.
        _S.DISPATCHED: frozenset(
            {_S.STREAMING, _S.QUEUED, _S.COMPLETED, _S.CANCELLED, _S.EXPIRED, _S.REJECTED, _S.FAILED}
        ),
        _S.STREAMING: frozenset({_S.QUEUED, _S.COMPLETED, _S.CANCELLED, _S.EXPIRED, _S.FAILED}),
        _S.COMPLETED: frozenset(),
        _S.CANCELLED: frozenset(),
        _S.EXPIRED: frozenset(),
        _S.REJECTED: frozenset(),
        _S.FAILED: frozenset(),
    }
)
"""Every allowed change of state."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: a terminal state, with the finish reason if it ended normally, else the error."""

    state: RequestState
    finish_reason: FinishReason | None = None
    error: TidegateError | None = None


_STATE_OF_STATUS: Mapping[str, RequestState] = MappingProxyType(
    {
        "DEADLINE_EXCEEDED": _S.EXPIRED,
        "RESOURCE_EXHAUSTED": _S.REJECTED,
        "INVALID_ARGUMENT": _S.REJECTED,
        "NOT_FOUND": _S.REJECTED,
        "ALREADY_EXISTS": _S.REJECTED,
        "PERMISSION_DENIED": _S.REJECTED,
    }
)


def finished(reason: FinishReason) -> Outcome:
    """The outcome of a normal end."""
    is_cancelled = reason is FinishReason.CANCELLED
    return Outcome(RequestState.CANCELLED if is_cancelled else RequestState.COMPLETED, finish_reason=reason)


def failed(error: TidegateError) -> Outcome:
    """The outcome of an error."""
    return Outcome(_STATE_OF_STATUS.get(error.status, RequestState.FAILED), error=error)


def gone() -> Outcome:
    """The outcome when the client went away."""
    return Outcome(RequestState.CANCELLED)


class Lifecycle:
    """The state of one request. Its first outcome is its only one."""

    def __init__(self) -> None:
        self.state = RequestState.RECEIVED
        self.outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"Lifecycle({self.state.value})"

    @property
    def is_ended(self) -> bool:
        """Whether the outcome is decided."""
        return self.outcome is not None

    def advance(self, state: RequestState) -> None:
        """Moves to a state that is no end. Raises ValueError if the table has no such change."""
        if state not in TRANSITIONS[self.state] or state.is_terminal:
            raise ValueError(f"a request cannot go from {self.state.value} to {state.value}")
        self.state = state

    def finish(self, outcome: Outcome) -> bool:
        """Decides the outcome. False, and no change, if it is decided already."""
        if self.outcome is not None:
            return False
        state = outcome.state
        if state not in TRANSITIONS[self.state]:
            # A refusal after the start of the stream (e.g. a limit) is a failure of the stream, and a stop that the
            # gateway itself finds while the request waits again after a lost worker is still a completion.
            state = RequestState.FAILED if outcome.error is not None else state
        self.state = state
        self.outcome = outcome
        return True
