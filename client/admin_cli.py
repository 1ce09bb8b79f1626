"""`python -m client admin`: what operators ask and tell a gateway."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from client.admin import AdminClient
from client.options import AdminAccess, BandName, command
from client.terminal import write_answer
from common.types import Band, Reason
from protos.inference.v1 import admin_pb2, types_pb2

admin = typer.Typer(no_args_is_help=True, help="Look at a deployment, set tenants, drain parts. Needs the admin key.")

TenantId = Annotated[str, typer.Argument(help="The tenant's id.")]
Limit = Annotated[
    list[str] | None, typer.Option("--limit", "-l", help="NAME=VALUE, as in the tenants file; NAME= removes it.")
]


@command(admin)
def workers(access: AdminAccess = AdminAccess()) -> None:
    """List workers: sessions, slots, KV blocks, as the gateway sees them."""
    access.report(AdminClient.list_workers, _write_workers)


def _write_workers(answer: admin_pb2.ListWorkersResponse) -> None:
    table = Table("worker", "state", "model", "slots free/all", "blocks free/all", "running", "waiting", "address")
    for each in answer.workers:
        numbers = ["?", "?", "?", "?"]
        if each.has_report:
            blocks = f"{each.free_blocks}/{each.num_blocks}"
            numbers = [f"{each.free_slots}/{each.max_num_seqs}", blocks, str(each.running), str(each.waiting)]
        state = each.state if each.announced else f"{each.state}, not announced"
        table.add_row(*map(Text, (each.worker_id, state, each.model, *numbers, each.address)))
    _print(table)


@command(admin)
def queue(access: AdminAccess = AdminAccess()) -> None:
    """Show how many requests wait in the whole fleet, and how long: by band, and by flow in the order of turns."""
    access.report(AdminClient.show_queue, _write_queue)


def _write_queue(answer: admin_pb2.ShowQueueResponse) -> None:
    bands = Table("band", "waiting", "longest wait (s)")
    for each in answer.bands:
        bands.add_row(_band(each.band), str(each.num_waiting), f"{each.oldest_wait_s:.1f}")
    _print(bands)
    flows = Table("model", "band", "tenant", "waiting", "longest wait (s)", "served (tokens by weight)", "weight")
    for flow in answer.flows:
        numbers = (str(flow.num_waiting), f"{flow.oldest_wait_s:.1f}", f"{flow.served:.0f}", str(flow.weight))
        flows.add_row(*map(Text, (flow.model, _band(flow.band), flow.tenant_id, *numbers)))
    if answer.flows:
        _print(flows)


@command(admin)
def tenants(access: AdminAccess = AdminAccess()) -> None:
    """List the tenants that the gateway accepts with their limits and what is left of them; never their keys."""
    access.report(AdminClient.list_tenants, lambda answer: _write_tenants(*answer.tenants))


def _write_tenants(*statuses: admin_pb2.TenantStatus) -> None:
    table = Table("tenant", "band", "weight", "from", "live here", "limits", "left")
    for each in statuses:
        limits = ", ".join(f"{name}={value}" for name, value in sorted(each.limits.items()))
        left = ", ".join(f"{name}={value}" for name, value in sorted(each.remaining.items()))
        numbers = (str(each.weight), each.source, str(each.num_live))
        table.add_row(*map(Text, (each.tenant_id, _band(each.max_band), *numbers, limits or "none", left)))
    _print(table)


@command(admin)
def set_tenant(
    tenant: TenantId,
    band: Annotated[BandName | None, typer.Option(help="The highest band that its requests may have.")] = None,
    weight: Annotated[int, typer.Option(min=0, max=1000, help="Its part of a backlogged band; 0: as it is.")] = 0,
    limit: Limit = None,
    key_sha256: Annotated[
        list[str] | None, typer.Option(help="SHA-256 of an API key, in place of all its keys; may be repeated.")
    ] = None,
    access: AdminAccess = AdminAccess(),
) -> None:
    """Change a tenant on all gateways, or add one; what is not given stays as it is. Goes before the tenants file."""
    pairs = [each.partition("=") for each in limit or ()]
    if any(not separator for _, separator, _ in pairs):
        raise typer.BadParameter("--limit must be NAME=VALUE, or NAME= to remove it")
    request = admin_pb2.SetTenantRequest(
        tenant_id=tenant,
        max_band=types_pb2.BAND_UNSPECIFIED if band is None else types_pb2.Band.ValueType(Band[band.name]),
        weight=weight,
        limits={name: value for name, _, value in pairs},
        key_sha256=key_sha256,
    )
    access.report(lambda client: client.set_tenant(request), lambda answer: _write_tenants(answer.tenant))


@command(admin)
def delete_tenant(tenant: TenantId, access: AdminAccess = AdminAccess()) -> None:
    """Shut a tenant out on all gateways, whatever the tenants file says. Its requests that run go on."""
    access.report(lambda client: client.delete_tenant(tenant), lambda _: write_answer(f"tenant {tenant} is shut out\n"))


@command(admin)
def reset_tenant(tenant: TenantId, access: AdminAccess = AdminAccess()) -> None:
    """Forget what was set or deleted: the tenant is as the tenants file says again."""
    access.report(
        lambda client: client.reset_tenant(tenant),
        lambda _: write_answer(f"tenant {tenant} is as the tenants file says\n"),
    )


@command(admin)
def why(
    tenant: TenantId,
    request_id: Annotated[str, typer.Argument(help="The request's id, as the client has it.")],
    access: AdminAccess = AdminAccess(),
) -> None:
    """Say why a request waits, where it runs, or why it was refused."""
    access.report(lambda client: client.explain(tenant, request_id), _write_why)


def _write_why(answer: admin_pb2.ExplainRequestResponse) -> None:
    write_answer(f"{answer.state}: {answer.explanation}\n")
    for name, value in _facts(answer).items():
        write_answer(f"  {name}: {value}\n")
    if answer.workers:
        table = Table("worker", "free slots", "free blocks", "blocks needed", "obstacle")
        for each in answer.workers:
            numbers = (str(each.free_slots), str(each.free_blocks), str(each.blocks_needed))
            table.add_row(*map(Text, (each.worker_id, *numbers, each.obstacle or "none")))
        _print(table)


@command(admin)
def refusals(
    tenant: TenantId,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 20,
    access: AdminAccess = AdminAccess(),
) -> None:
    """List the tenant's last requests that this gateway has refused, latest first; each gateway knows its own."""
    access.report(lambda client: client.list_refusals(tenant, count), _write_refusals)


def _write_refusals(answer: admin_pb2.ListRefusalsResponse) -> None:
    table = Table("ago (s)", "request", "status", "reason", "message", "may come back")
    for each in answer.refusals:
        what = (each.request_id or "-", each.status, Reason(each.reason).name, each.message)
        table.add_row(*map(Text, (f"{each.age_s:.0f}", *what, "yes" if each.may_come_back else "no")))
    _print(table)


@command(admin)
def drain_worker(
    worker_id: Annotated[str, typer.Argument(help="The worker's id.")], access: AdminAccess = AdminAccess()
) -> None:
    """Let a worker finish what it runs within its drain time, hand back the rest, and end."""
    access.report(
        lambda client: client.drain_worker(worker_id),
        lambda answer: write_answer(f"worker {worker_id} drains; it runs {answer.running} requests\n"),
    )


@command(admin)
def drain_gateway(access: AdminAccess = AdminAccess()) -> None:
    """Let the gateway that answers finish its streams within its drain time, and end."""
    access.report(
        AdminClient.drain_gateway,
        lambda answer: write_answer(f"gateway {answer.gateway_id} drains; it holds {answer.num_live} requests\n"),
    )


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
        facts["waits for"] = answer.waits_for
        facts["ahead"] = (
            f"{answer.num_ahead_in_flow} of its tenant; {answer.num_flows_first} tenants of its band; "
            f"{answer.num_waiting_above} in higher bands; {answer.num_earlier_here} of this gateway's wait longer, "
            f"{answer.num_waiting_in_band} wait in the band"
        )
    if answer.reason:
        facts["reason"] = Reason(answer.reason).name
    return {name: value for name, value in facts.items() if value}


def _band(value: int) -> str:
    return Band(value).name.lower()


def _print(table: Table) -> None:
    Console().print(table)
