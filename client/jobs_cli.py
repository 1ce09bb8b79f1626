"""`python -m client jobs`: leave work, look at it, fetch what came of it."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Annotated

import typer

from client.connection import EXIT_FAILED
from client.jobs import Job
from client.options import AsJson, SamplingOptions, TenantAccess, command
from client.terminal import note, write_answer
from client.types import Chat, Message
from common.types import JobState

jobs = typer.Typer(no_args_is_help=True, help="Leave work in the low band, and fetch its results later.")

JobId = Annotated[str, typer.Argument(help="The job's id.")]


@command(jobs)
def submit(
    prompt: Annotated[str, typer.Argument(help="A user's turn; - reads standard input.")],
    system: Annotated[str, typer.Option("--system", "-s", help="The system message.")] = "",
    job_id: Annotated[str, typer.Option("--id", help="The job's id; chosen by the gateway if left out.")] = "",
    model: Annotated[str, typer.Option("--model", "-m", help="The model; the default if left out.")] = "",
    sampling: SamplingOptions = SamplingOptions(),
    access: TenantAccess = TenantAccess(timeout=60.0),
) -> None:
    """Leave a request; its job's id is the output."""
    content = sys.stdin.read() if prompt == "-" else prompt
    turns = [Message("system", system)] if system else []
    chat = Chat([*turns, Message("user", content)])
    job = access.call(
        lambda client: client.submit_job(
            chat, sampling.sampling(), model=model, job_id=job_id, timeout_s=access.timeout
        )
    )
    write_answer(f"{job.job_id}\n")


@command(jobs)
def get(
    job_id: JobId,
    access: TenantAccess = TenantAccess(),
) -> None:
    """Print a job's result. Exit status 0 if, and only if, it is done."""
    job = access.call(lambda client: client.get_job(job_id, timeout_s=access.timeout))
    if job.result is None:
        note(_describe(job))
        raise typer.Exit(EXIT_FAILED)
    write_answer(job.result.text + "\n")


@command(jobs, "list")
def list_jobs(
    access: TenantAccess = TenantAccess(),
    as_json: AsJson = False,
) -> None:
    """List the tenant's jobs, newest first."""
    for job in access.call(lambda client: client.list_jobs(timeout_s=access.timeout)):
        if as_json:
            fields = {
                "job_id": job.job_id,
                "state": job.state.name,
                "output_tokens": job.output_tokens,
                "created_at": job.created_at,
                "ended_at": job.ended_at,
                "runs": job.runs,
            }
            write_answer(json.dumps(fields) + "\n")
        else:
            write_answer(_describe(job) + "\n")


@command(jobs)
def cancel(
    job_id: JobId,
    access: TenantAccess = TenantAccess(),
) -> None:
    """End a job that has not ended."""
    job = access.call(lambda client: client.cancel_job(job_id, timeout_s=access.timeout))
    note(_describe(job))
    if job.state is not JobState.CANCELLED:
        raise typer.Exit(EXIT_FAILED)


def _describe(job: Job) -> str:
    created = datetime.fromtimestamp(job.created_at).astimezone().isoformat(" ", "seconds")
    cause = f"  {job.reason.name}: {job.message}" if job.reason is not None else ""
    return f"{job.job_id}  {job.state.name.lower()}  {job.output_tokens} tokens  {created}{cause}"
