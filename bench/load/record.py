"""One request of a run: what was sent, and when each of its tokens came."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from bench.load.tenants import Origin
from common.types import Usage

OK = "OK"
INTERRUPTED = "INTERRUPTED"
"""Status of a request that was under way when the run was stopped; it counts as neither completed nor failed."""
REFUSALS = {"RESOURCE_EXHAUSTED"}
"""Statuses by which a gateway says no to a request it could serve: over a limit, or the queue is full."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be sent. `arrival_s`: seconds from the start of an open loop's run; a closed loop has no schedule."""

    index: int
    kind: str
    origin: Origin
    prompt: tuple[int, ...]
    num_output: int  # tokens, all of which are generated
    arrival_s: float = 0.0


@dataclass(slots=True)
class Record:
    """What has come of a request. Times are seconds from the run's start."""

    request: LoadRequest
    scheduled_s: float
    sent_s: float | None = None  # None: never sent
    end_s: float | None = None
    status: str = ""  # of gRPC, OK or INTERRUPTED; empty while it runs
    reason: str = ""  # the server's word for a failure
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # time, tokens
    usage: Usage | None = None
    queue_s: float | None = None  # as the gateway saw it

    @property
    def is_completed(self) -> bool:
        """Whether the answer came to its normal end."""
        return self.status == OK

    @property
    def is_failed(self) -> bool:
        """Whether it ended in an error, a refusal included."""
        return self.status not in ("", OK, INTERRUPTED)

    @property
    def is_refused(self) -> bool:
        """Whether the gateway said no."""
        return self.status in REFUSALS

    @property
    def outcome(self) -> str:
        """Status and reason in one word."""
        return f"{self.status}/{self.reason}" if self.reason else self.status

    @property
    def num_output(self) -> int:
        """Tokens received; by the gateway's count once it has given one."""
        return self.usage.completion_tokens if self.usage else sum(tokens for _, tokens in self.deliveries)

    @property
    def ttft_s(self) -> float | None:
        """First token - scheduled arrival; None without a token."""
        return self.deliveries[0][0] - self.scheduled_s if self.deliveries else None

    @property
    def tpot_s(self) -> float | None:
        """(Last - first token) / (output tokens - 1); None below two tokens."""
        if self.num_output < 2 or not self.deliveries:
            return None
        return (self.deliveries[-1][0] - self.deliveries[0][0]) / (self.num_output - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between consecutive deliveries."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.deliveries)]

    @property
    def e2e_s(self) -> float | None:
        """End - scheduled arrival; None while it runs."""
        return None if self.end_s is None else self.end_s - self.scheduled_s

    @property
    def lag_s(self) -> float:
        """How late it was sent: 0 if it never was."""
        return max(0.0, self.sent_s - self.scheduled_s) if self.sent_s is not None else 0.0
