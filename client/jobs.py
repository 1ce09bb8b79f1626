"""Work that nobody waits for: submit, look, cancel."""

from __future__ import annotations

from dataclasses import dataclass

from client.codec import to_completion
from client.types import Completion
from common.types import JobState, Reason
from protos.inference.v1 import jobs_pb2


@dataclass(frozen=True, slots=True)
class Job:
    """A job; times in seconds since 1970 UTC."""

    job_id: str
    state: JobState
    output_tokens: int  # generated so far
    created_at: float
    ended_at: float | None  # None while it has not ended
    runs: int  # how often a gateway has begun or gone on with it
    result: Completion | None  # of a job that is DONE; not in lists
    reason: Reason | None  # of a job that has FAILED
    message: str  # of a job that has FAILED


def to_job(message: jobs_pb2.Job) -> Job:
    """A job from the wire."""
    return Job(
        job_id=message.job_id,
        state=JobState(message.state),
        output_tokens=message.output_tokens,
        created_at=message.created_at,
        ended_at=message.ended_at or None,
        runs=message.runs,
        result=to_completion(message.result) if message.HasField("result") else None,
        reason=Reason(message.reason) if message.reason else None,
        message=message.message,
    )
