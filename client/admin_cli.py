"""`python -m client admin`: what operators ask and tell a gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from client.admin import AdminClient
from client.connection import failures, secured
from client.terminal import write_answer
from common.types import Band, Reason
from protos.inference.v1 import admin_pb2

admin = typer.Typer(no_args_is_help=True, help="Look at a deployment and drain its parts. Needs the admin key.")

_M = TypeVar("_M", bound=Message)

Address = Annotated[
    str, typer.Option("--address", "-a", envvar="TIDEGATE_ADDRESS", help="The gateway, HOST:PORT.", show_envvar=True)
]
AdminKey = Annotated[
    str, typer.Option("--admin-key", envvar="TIDEGATE_ADMIN_KEY", help="The operators' key.", show_default=False)
]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, trusting the system's authorities.")]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds for the call.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")]

DEFAULT_ADDRESS = "127.0.0.1:50051"


@admin.command()
def workers(
    address: Address = DEFAULT_ADDRESS,
    admin_key: AdminKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """List workers: sessions, slots, KV blocks, as the gateway sees them."""
    answer = _run(address, admin_key, timeout, tls, AdminClient.list_workers)
    if as_json:
        _write_json(answer)
        return
    table = Table("worker", "state", "model", "slots free/all", "blocks free/all", "running", "waiting", "address")
    for each in answer.workers:
        numbers = ["?", "?", "?", "?"]
        if each.has_report:
            blocks = f"{each.free_blocks}/{each.num_blocks}"
            numbers = [f"{each.free_slots}/{each.max_num_seqs}", blocks, str(each.running), str(each.waiting)]
        state = each.state if each.announced else f"{each.state}, not announced"
        table.add_row(*map(Text, (each.worker_id, state, each.model, *numbers, each.address)))
    _print(table)


@admin.command()
def queue(
    address: Address = DEFAULT_ADDRESS,
    admin_key: AdminKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """Show how many requests of each band wait in the whole fleet, and how long."""
    answer = _run(address, admin_key, timeout, tls, AdminClient.show_queue)
    if as_json:
        _write_json(answer)
        return
    table = Table("band", "waiting", "longest wait (s)")
    for each in answer.bands:
        table.add_row(_band(each.band), str(each.num_waiting), f"{each.oldest_wait_s:.1f}")
    _print(table)


@admin.command()
def tenants(
    address: Address = DEFAULT_ADDRESS,
    admin_key: AdminKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """List tenants with their bands, weights and limits; never their keys."""
    answer = _run(address, admin_key, timeout, tls, AdminClient.list_tenants)
    if as_json:
        _write_json(answer)
        return
    table = Table("tenant", "band", "weight", "live here", "limits")
    for each in answer.tenants:
        limits = ", ".join(f"{name}={value}" for name, value in sorted(each.limits.items()))
        row = (each.tenant_id, _band(each.max_band), str(each.weight), str(each.num_live), limits or "none")
        table.add_row(*map(Text, row))
    _print(table)


@admin.command()
def why(
    tenant: Annotated[str, typer.Argument(help="The tenant's id.")],
    request_id: Annotated[str, typer.Argument(help="The request's id, as the client has it.")],
    address: Address = DEFAULT_ADDRESS,
    admin_key: AdminKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """Say why a request waits, where it runs, or why it was refused."""
    answer = _run(address, admin_key, timeout, tls, lambda client: client.explain(tenant, request_id))
    if as_json:
        _write_json(answer)
        return
    write_answer(f"{answer.state}: {answer.explanation}\n")
    for name, value in _facts(answer).items():
        write_answer(f"  {name}: {value}\n")
    if answer.workers:
        table = Table("worker", "free slots", "free blocks", "blocks needed", "obstacle")
        for each in answer.workers:
            numbers = (str(each.free_slots), str(each.free_blocks), str(each.blocks_needed))
            table.add_row(*map(Text, (each.worker_id, *numbers, each.obstacle or "none")))
        _print(table)


@admin.command()
def drain_worker(
    worker_id: Annotated[str, typer.Argument(help="The worker's id.")],
    address: Address = DEFAULT_ADDRESS,
    admin_key: AdminKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """Let a worker finish what it runs within its drain time, hand back the rest, and end."""
    answer = _run(address, admin_key, timeout, tls, lambda client: client.drain_worker(worker_id))
    if as_json:
        _write_json(answer)
    else:
        write_answer(f"worker {worker_id} drains; it runs {answer.running} requests\n")


@admin.command()
def drain_gateway(
    address: Address = DEFAULT_ADDRESS,
    admin_key: AdminKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: AsJson = False,
) -> None:
    """Let the gateway that answers finish its streams within its drain time, and end."""
    answer = _run(address, admin_key, timeout, tls, AdminClient.drain_gateway)
    if as_json:
        _write_json(answer)
    else:
        write_answer(f"gateway {answer.gateway_id} drains; it holds {answer.num_live} requests\n")


def _facts(answer: admin_pb2.ExplainRequestResponse) -> dict[str, str]:
    facts = {"gateway": answer.gateway_id, "model": answer.model, "worker": answer.worker_id}
    if answer.band:
        facts |= {
            "band": _band(answer.band),
            "age": f"{answer.age_s:.1f} s",
            "waited": f"{answer.waited_s:.1f} s",
            "tokens": f"{answer.prompt_tokens} of the prompt, {answer.output_tokens} received so far",
            "needs": f"room for {answer.tokens_needed} tokens",
            "attempts": f"{answer.attempt}, {answer.num_losses} of them lost",
        }
    if answer.state == "queued":
        facts["ahead"] = f"{answer.num_earlier_here} of this gateway's; {answer.num_waiting_in_band} wait in the band"
    if answer.reason:
        facts["reason"] = Reason(answer.reason).name
    return {name: value for name, value in facts.items() if value}


def _band(value: int) -> str:
    return Band(value).name.lower()


def _print(table: Table) -> None:
    Console().print(table)


def _write_json(answer: Message) -> None:
    fields = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    write_answer(json.dumps(fields) + "\n")


def _run(address: str, admin_key: str, timeout_s: float, tls: bool, call: Callable[[AdminClient], Awaitable[_M]]) -> _M:
    async def run() -> _M:
        with secured(tls) as (credentials, options):
            client = AdminClient(address, admin_key, options=options, credentials=credentials, timeout_s=timeout_s)
        async with client:
            return await call(client)

    with failures():
        return asyncio.run(run())
