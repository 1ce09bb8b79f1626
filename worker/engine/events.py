"""What a step tells the outside: plain values, no reference into the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from common.types import BlockUsage, FinishReason, PositionLogprobs, Reason
from worker.engine.executor import ExecutionError


class RequestOutput(NamedTuple):
    """New tokens of one request. With a finish reason it is the request's terminal event: nothing follows it."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]  # one per token, or none
    finish_reason: FinishReason | None
    cached_prompt_tokens: int  # found in the prefix cache; 0 except in the first output of an attempt


class RequestRejected(NamedTuple):
    """A submit that was not taken, or a taken request that failed: then it is the request's terminal event.

    NO_CREDIT and DRAINING say that another worker, or a later try, can serve it.
    """

    request_id: str
    attempt: int
    reason: Reason
    message: str  # what it needs and what there is; may be shown to the client


class HandedBack(NamedTuple):
    """A taken request that another worker is to go on with: its terminal event."""

    request_id: str
    attempt: int


@dataclass(slots=True)
class SessionOutput:
    """All news of one step for one session.

    A usage replaces an earlier one, but for its `accounted`: these are new each time, so whoever merges joins them.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    rejected: list[RequestRejected] = field(default_factory=list)
    usage: BlockUsage | None = None  # set when it changed for this session
    handed_back: list[HandedBack] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Numbers of one step, for metrics."""

    num_rows: int  # requests in the batch
    num_tokens: int  # computed by the batch
    num_sampled: int  # output tokens made
    num_prompt_tokens: int  # of requests admitted in this step for the first time
    num_hit_tokens: int  # found in the prefix cache by requests admitted in this step
    num_preemptions: int
    num_recomputed_tokens: int  # to be computed again by requests readmitted in this step
    num_yielded: int  # of the preemptions, those that made way for a newcomer
    num_overtakes: int  # admissions before an earlier request that waits for memory
    num_abandoned: int  # requests ended since the last step because their session had
    num_decodes: int  # requests that decoded one token, without the long ones
    num_long_decodes: int  # requests of level 3 that decoded one token
    first_chunk_waits_s: tuple[float, ...]  # of every request that had its first chunk: from arrival to this step
    num_saved_tokens: int  # of preempted requests, copied to host memory
    num_loaded_tokens: int  # copied back, for requests admitted in this step
    thrash_ratio: float  # of the recently computed tokens, those computed before and lost to a preemption
    running: int
    waiting: int
    empty_blocks: int
    cached_blocks: int
    referenced_blocks: int
    swapping_blocks: int
    promised_blocks: int  # of the free ones, those that running requests may take yet
    num_held_tokens: int  # computed, in referenced blocks
    num_held_slots: int  # for tokens in referenced blocks


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did: news by session id, numbers, and why it failed if it did (for the log)."""

    sessions: dict[int, SessionOutput]
    stats: StepStats
    error: ExecutionError | None = None
