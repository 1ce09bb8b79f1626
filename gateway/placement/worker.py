"""The port of one worker as a gateway sees it: commands down, events up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from common.types import (
    Band,
    BlockUsage,
    FinishReason,
    ModelLimits,
    PositionLogprobs,
    Reason,
    SamplingParams,
)
from gateway.placement.model import ServedModel


class WorkerState(Enum):
    """CONNECTING -> READY -> DRAINING -> CLOSED, or -> LOST from any."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt of one request, ready to run."""

    request_id: str
    attempt: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # of earlier attempts
    sampling: SamplingParams
    band: Band
    cache_salt: str
    timeout_s: float = 0.0  # until its client gives up; 0: it has set no bound
    may_hand_back: bool = False  # if it is long and finds no memory there any more


class TokensEvent(NamedTuple):
    """New tokens of one request, possibly its last. Made for every token: a tuple costs a third of a frozen class."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    cached_prompt_tokens: int  # 0 except in the first event of an attempt


@dataclass(frozen=True, slots=True)
class RejectedEvent:
    """The worker did not take a submission."""

    request_id: str
    attempt: int
    reason: Reason
    message: str


class SessionListener(Protocol):
    """What a session tells its gateway; called on the event loop, must not block."""

    def on_tokens(self, worker_id: str, event: TokensEvent) -> None:
        """New tokens of a request."""
        ...

    def on_late_tokens(self, num_tokens: int) -> None:
        """Tokens of a submission that was aborted: the worker did not know yet."""
        ...

    def on_rejected(self, worker_id: str, event: RejectedEvent) -> None:
        """A submission was not taken."""
        ...

    def on_handed_back(self, worker_id: str, request_id: str, attempt: int) -> None:
        """A long request finds no memory there any more, and is to go on elsewhere."""
        ...

    def on_usage(self, worker_id: str, usage: BlockUsage) -> None:
        """The worker's numbers changed, or it is alive."""
        ...

    def on_ready(self, session: WorkerSession, model: ServedModel) -> bool:
        """The session is open and the model described: submissions may follow.

        False if there is a session with this start of the worker already: this one is to be closed.
        """
        ...

    def on_change(self) -> None:
        """The state of a session that is ready has changed to DRAINING."""
        ...

    def on_end(self, worker_id: str, epoch: int, state: WorkerState) -> None:
        """The session is over: none of its requests will get another event.

        CLOSED after a goodbye, or when a draining worker has ended it; else LOST.
        """
        ...


class WorkerSession(Protocol):
    """A live session with one worker."""

    @property
    def worker_id(self) -> str:
        """The worker's id, unique in the fleet."""
        ...

    @property
    def epoch(self) -> int:
        """Which start of the worker this is; grows."""
        ...

    @property
    def state(self) -> WorkerState:
        """Where the session is."""
        ...

    @property
    def limits(self) -> ModelLimits:
        """What the worker's model and pool allow."""
        ...

    def submit(self, submission: Submission, *, is_alone: bool) -> None:
        """Sends it; never blocks. Answers come to the listener. Raises UnavailableError if the session is over.

        `is_alone`: no others come with it, in company with which it costs less and takes longer.
        """
        ...

    def abort(self, request_id: str, attempt: int) -> None:
        """Tells the worker to stop it; nothing if the session is over. Events already on the way may still come."""
        ...

    def set_paused(self, request_id: str, attempt: int, is_paused: bool) -> None:
        """Tells the worker to compute nothing more for it, or to go on; nothing if it is not there any more."""
        ...
