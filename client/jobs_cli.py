"""`python -m client jobs`: leave work, look at it, fetch what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, TypeVar

import typer

from client.client import Client
from client.connection import EXIT_FAILED, connect, failures
from client.jobs import Job
from client.terminal import note, write_answer
from client.types import Chat, Message, Sampling
from common.types import JobState

jobs = typer.Typer(no_args_is_help=True, help="Leave work in the low band, and fetch its results later.")

_T = TypeVar("_T")

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="TIDEGATE_ADDRESS", help="The gateway, HOST:PORT.", show_envvar=True)
]
ApiKey = Annotated[
    str, typer.Option("--api-key", "-k", envvar="TIDEGATE_API_KEY", help="The tenant's key.", show_default=False)
]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, trusting the system's authorities.")]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for the call.")]
JobId = Annotated[str, typer.Argument(help="The job's id.")]

DEFAULT_ADDRESS = "127.0.0.1:50051"


@jobs.command()
def submit(
    prompt: Annotated[str, typer.Argument(help="A user's turn; - reads standard input.")],
    system: Annotated[str, typer.Option("--system", "-s", help="The system message.")] = "",
    job_id: Annotated[str, typer.Option("--id", help="The job's id; chosen by the gateway if left out.")] = "",
    model: Annotated[str, typer.Option("--model", "-m", help="The model; the default if left out.")] = "",
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. [0, 100]")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed, the same answer.")] = None,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    timeout: TimeoutS = 60.0,
    tls: Tls = False,
) -> None:
    """Leave a request; its job's id is the output."""
    content = sys.stdin.read() if prompt == "-" else prompt
    turns = [Message("system", system)] if system else []
    chat = Chat([*turns, Message("user", content)])
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    job = _run(
        address,
        api_key,
        tls,
        lambda client: client.submit_job(chat, sampling, model=model, job_id=job_id, timeout_s=timeout),
    )
    write_answer(f"{job.job_id}\n")


@jobs.command()
def get(
    job_id: JobId,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
) -> None:
    """Print a job's result. Exit status 0 if, and only if, it is done."""
    job = _run(address, api_key, tls, lambda client: client.get_job(job_id, timeout_s=timeout))
    if job.result is None:
        note(_describe(job))
        raise typer.Exit(EXIT_FAILED)
    write_answer(job.result.text + "\n")


@jobs.command("list")
def list_jobs(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object for each line.")] = False,
) -> None:
    """List the tenant's jobs, newest first."""
    for job in _run(address, api_key, tls, lambda client: client.list_jobs(timeout_s=timeout)):
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


@jobs.command()
def cancel(
    job_id: JobId,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
) -> None:
    """End a job that has not ended."""
    job = _run(address, api_key, tls, lambda client: client.cancel_job(job_id, timeout_s=timeout))
    note(_describe(job))
    if job.state is not JobState.CANCELLED:
        raise typer.Exit(EXIT_FAILED)


def _describe(job: Job) -> str:
    created = datetime.fromtimestamp(job.created_at).astimezone().isoformat(" ", "seconds")
    cause = f"  {job.reason.name}: {job.message}" if job.reason is not None else ""
    return f"{job.job_id}  {job.state.name.lower()}  {job.output_tokens} tokens  {created}{cause}"


def _run(address: str, api_key: str, tls: bool, call: Callable[[Client], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        async with await connect(address, api_key, tls) as client:
            return await call(client)

    with failures():
        return asyncio.run(run())
