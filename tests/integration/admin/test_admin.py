"""The admin service and its command line, on real gateways with scripted workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from client import ClientError
from client.admin import AdminClient
from client.cli import app as cli
from common.types import Band, Reason
from gateway.app import GatewayApp
from protos.inference.v1 import admin_pb2, types_pb2
from tests.integration.gateway.rig import Rig, announce, eventually, generate_request, read, reason_of

ADMIN_KEY = "operators-secret"


def admin_of(app: GatewayApp, key: str = ADMIN_KEY) -> AdminClient:
    return AdminClient(f"127.0.0.1:{app.port}", key, timeout_s=60.0)


async def full(app: GatewayApp) -> None:
    """Until the gateway has heard that its worker has no place left."""
    [session] = app._dialer.sessions.values()
    await eventually(lambda: session.usage is not None and session.usage.free_slots == 0)


CALLS: list[Callable[[AdminClient], Awaitable[Any]]] = [
    AdminClient.list_workers,
    AdminClient.show_queue,
    AdminClient.list_tenants,
    lambda client: client.set_tenant(admin_pb2.SetTenantRequest(tenant_id="acme", weight=9)),
    lambda client: client.delete_tenant("acme"),
    lambda client: client.reset_tenant("acme"),
    lambda client: client.explain("acme", "r1"),
    lambda client: client.list_refusals("acme"),
    lambda client: client.drain_worker("w1"),
    AdminClient.drain_gateway,
]


@pytest.mark.parametrize(
    ("configured", "shown"),
    [(ADMIN_KEY, ""), (ADMIN_KEY, "key-acme"), (ADMIN_KEY, "fleet-secret"), ("", ""), ("", ADMIN_KEY)],
)
async def test_nobody_gets_in_without_the_admin_key(rig: Rig, configured: str, shown: str) -> None:
    app = await rig.gateway(admin_key=configured)
    async with admin_of(app, shown) as client:
        for call in CALLS:
            with pytest.raises(ClientError) as caught:
                await call(client)
            assert caught.value.status == "UNAUTHENTICATED"
    assert not app.drain_wanted.is_set()


async def test_the_admin_key_is_no_tenants_key(rig: Rig) -> None:
    app = await rig.gateway(admin_key=ADMIN_KEY)
    client = await rig.client(app, ADMIN_KEY)
    answer = await client.ask()
    assert answer.error is not None
    assert answer.error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_workers_are_shown_with_their_numbers(rig: Rig) -> None:
    worker = await rig.worker(worker_id="w1", step_s=None, max_num_seqs=4, num_blocks=100)
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    far = await rig.worker(worker_id="w2", model="other")
    await far.kill()
    await announce(app, far)  # nobody answers there
    call = client.generate(generate_request(sampling={"max_tokens": 8}))
    await worker.wait_for(lambda: len(worker.running) == 1)
    async with admin_of(app) as admin:
        answer = await admin.list_workers()
        while answer.workers[0].running == 0:  # the report of it may still be on its way
            answer = await admin.list_workers()
    assert answer.gateway_id == app.gateway_id
    first, second = answer.workers
    assert (first.worker_id, first.state, first.announced, first.has_report) == ("w1", "ready", False, True)
    assert (first.free_slots, first.max_num_seqs, first.running, first.num_blocks) == (3, 4, 1, 100)
    assert first.free_blocks == 100 - first.referenced_blocks < 100
    assert (second.worker_id, second.state, second.announced, second.has_report) == ("w2", "no session", True, False)
    call.cancel()


async def test_the_queue_and_the_tenants_are_shown(rig: Rig) -> None:
    worker = await rig.worker(step_s=None, max_num_seqs=1)
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    paid = await rig.client(app, "key-paid")
    calls = [client.generate(generate_request(f"ask {number}")) for number in range(3)]
    await worker.wait_for(lambda: len(worker.running) == 1)
    calls.append(paid.generate(generate_request("paid")))
    async with admin_of(app) as admin:
        depths: dict[int, int] = {}
        while sum(depths.values()) < 3:
            depths = {band.band: band.num_waiting for band in (await admin.show_queue()).bands}
        assert depths == {types_pb2.BAND_HIGH: 1, types_pb2.BAND_NORMAL: 2, types_pb2.BAND_LOW: 0}
        tenants = {tenant.tenant_id: tenant for tenant in (await admin.list_tenants()).tenants}
    assert list(tenants) == ["acme", "batch", "paid"]
    assert (tenants["acme"].max_band, tenants["acme"].num_live) == (Band.NORMAL, 3)
    assert "key-acme" not in str(tenants)
    for call in calls:
        call.cancel()


async def test_why_a_request_waits_runs_or_was_refused(rig: Rig) -> None:
    worker = await rig.worker(worker_id="w1", step_s=None, max_num_seqs=1)
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    running = client.generate(generate_request(request_id="first"))
    await worker.wait_for(lambda: len(worker.running) == 1)
    await full(app)
    waiting = [client.generate(generate_request(request_id=f"later-{number}")) for number in range(2)]
    for call in waiting:
        assert (await call.read()).HasField("accepted")
    async with admin_of(app) as admin:
        first = await admin.explain("acme", "first")
        assert (first.state, first.worker_id, first.attempt) == ("dispatched", "w1", 1)
        last = await admin.explain("acme", "later-1")
        assert (last.state, last.worker_id, last.gateway_id) == ("queued", "", app.gateway_id)
        assert (last.num_earlier_here, last.num_waiting_in_band, last.band) == (1, 2, types_pb2.BAND_NORMAL)
        assert last.tokens_needed == last.prompt_tokens + 8
        assert [(room.worker_id, room.free_slots) for room in last.workers] == [("w1", 0)]
        assert "no slot is free" in last.workers[0].obstacle
        assert "it waits for room" in last.explanation
        assert "ahead of it are 1 requests of its tenant" in last.explanation
        place = (last.waits_for, last.num_ahead_in_flow, last.num_flows_first, last.num_waiting_above)
        assert place == ("room", 1, 0, 0)

        refused = await client.ask(request_id="bad", sampling={"temperature": -1.0})
        assert reason_of(refused.error) == "INVALID_PARAMETER"
        bad = await admin.explain("acme", "bad")
        assert (bad.state, bad.reason, bad.gateway_id) == ("refused", Reason.INVALID_PARAMETER.value, app.gateway_id)
        assert "temperature" in bad.explanation

        nameless = await client.ask(sampling={"max_tokens": 0})
        assert nameless.error is not None
        listed = await admin.list_refusals("acme")
        assert listed.gateway_id == app.gateway_id
        assert [(it.request_id, it.status) for it in listed.refusals] == [
            ("", "INVALID_ARGUMENT"),
            ("bad", "INVALID_ARGUMENT"),
        ]
        assert "max_tokens" in listed.refusals[0].message
        assert not listed.refusals[0].may_come_back
        assert len((await admin.list_refusals("acme", 1)).refusals) == 1
        assert not (await admin.list_refusals("paid")).refusals

        unknown = await admin.explain("paid", "first")  # another tenant's id
        assert unknown.state == "unknown"
        with pytest.raises(ClientError) as caught:
            await admin.explain("acme", "")
        assert caught.value.reason is Reason.INVALID_PARAMETER
    for call in (running, *waiting):
        call.cancel()


async def test_a_late_refusal_is_remembered_until_the_id_ends_well(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    async with admin_of(app) as admin:
        for timeout_s in (0.3, 3.0, 30.0):  # as much as it takes to be the gateway's by then
            late = await client.ask(request_id="again", timeout=timeout_s)
            assert late.error is not None
            await worker.wait_for(lambda: not worker.running)
            if late.accepted is not None:
                break
        while (answer := await admin.explain("acme", "again")).state != "refused":
            pass  # the gateway's own end of the call comes a little after the client's
        assert answer.reason == Reason.DEADLINE.value
        retried = client.generate(generate_request(request_id="again", sampling={"max_tokens": 1}))
        reading = asyncio.create_task(read(retried))
        await worker.wait_for(lambda: len(worker.running) == 1)
        await worker.step()
        assert (await reading).error is None
        assert (await admin.explain("acme", "again")).state == "unknown"


async def test_another_gateway_says_who_knows(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    app, client = await rig.serving(worker)
    other = await rig.gateway(admin_key=ADMIN_KEY)
    call = client.generate(generate_request(request_id="r1"))
    await worker.wait_for(lambda: len(worker.running) == 1)
    async with admin_of(other) as admin:
        answer = await admin.explain("acme", "r1")
    assert (answer.state, answer.gateway_id) == ("elsewhere", app.gateway_id)
    call.cancel()


async def test_any_gateway_knows_why_another_one_has_refused(rig: Rig) -> None:
    worker = await rig.worker()
    (app, client), (second, later) = [await rig.serving(worker, admin_key=ADMIN_KEY) for _ in range(2)]
    other = await rig.gateway(admin_key=ADMIN_KEY)
    await client.ask(request_id="r1", sampling={"temperature": -1.0})
    await later.ask(request_id="r2", sampling={"temperature": -1.0})

    async def told_by(gateway: GatewayApp, request_id: str, state: str) -> Any:
        async with admin_of(gateway) as admin, asyncio.timeout(30):
            while (answer := await admin.explain("acme", request_id)).state != state:  # noqa: ASYNC110 - as it comes
                await asyncio.sleep(0.02)
        return answer

    answer = await told_by(other, "r1", "refused")
    assert (answer.gateway_id, answer.reason) == (app.gateway_id, Reason.INVALID_PARAMETER.value)
    assert "temperature" in answer.explanation
    await rig.stop(second, 0)
    assert (await told_by(other, "r2", "refused")).gateway_id == second.gateway_id, "it has told it before it left"
    await client.ask(request_id="r2")
    assert (await told_by(other, "r2", "unknown")).gateway_id == "", "it has ended well since, elsewhere"
    assert (await told_by(app, "r1", "refused")).gateway_id == app.gateway_id


async def test_a_worker_is_told_to_drain(rig: Rig) -> None:
    worker = await rig.worker(worker_id="w1", step_s=None)
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    call = client.generate(generate_request())
    await worker.wait_for(lambda: len(worker.running) == 1)
    async with admin_of(app) as admin:
        with pytest.raises(ClientError) as caught:
            await admin.drain_worker("w9")
        assert caught.value.status == "NOT_FOUND"
        await admin.drain_worker("w1")
        assert (await admin.list_workers()).workers[0].state == "draining"
    await worker.wait_for(lambda: len(worker.drains) == 1)
    assert worker.drains[0].whole_worker
    call.cancel()


async def test_a_gateway_is_told_to_drain(rig: Rig) -> None:
    app = await rig.gateway(admin_key=ADMIN_KEY)
    async with admin_of(app) as admin:
        assert (await admin.drain_gateway()).gateway_id == app.gateway_id
    await asyncio.wait_for(app.drain_wanted.wait(), 30)


async def test_the_command_line(rig: Rig) -> None:
    worker = await rig.worker(worker_id="w1", step_s=None, max_num_seqs=1)
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    running = client.generate(generate_request(request_id="first"))
    await worker.wait_for(lambda: len(worker.running) == 1)
    await full(app)
    waiting = client.generate(generate_request(request_id="second"))
    assert (await waiting.read()).HasField("accepted")
    await eventually(lambda: len(app.dispatcher.live) == 2)

    async def run(*arguments: str, key: str = ADMIN_KEY) -> Result:
        command = ["admin", *arguments, "--address", f"127.0.0.1:{app.port}", "--admin-key", key]
        return await asyncio.to_thread(CliRunner().invoke, cli, command, env={"COLUMNS": "200"})

    async def run_json(*arguments: str) -> dict[str, Any]:
        result = await run(*arguments, "--json")
        assert result.exit_code == 0
        parsed: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return parsed

    shown = await run("workers")
    assert shown.exit_code == 0
    assert "w1" in shown.stdout
    assert "0/1" in shown.stdout
    assert (await run_json("workers"))["workers"][0]["free_slots"] == 0
    assert "normal" in (await run("queue")).stdout
    assert [band["num_waiting"] for band in (await run_json("queue"))["bands"]] == [0, 1, 0]
    (flow,) = (await run_json("queue"))["flows"]
    assert (flow["tenant_id"], flow["band"], flow["num_waiting"]) == ("acme", "BAND_NORMAL", 1)
    changed = await run("set-tenant", "acme", "--limit", "requests_per_minute=5", "--weight", "3")
    assert changed.exit_code == 0
    assert "requests_per_minute=5" in changed.stdout
    assert (await run("set-tenant", "acme", "--limit", "rpm=5")).exit_code == 1
    assert (await run("set-tenant", "acme", "--limit", "requests_per_minute")).exit_code == 2
    assert (await run("delete-tenant", "batch")).exit_code == 0
    assert (await run("reset-tenant", "acme")).exit_code == 0
    assert (await run("reset-tenant", "acme")).exit_code == 1
    assert "acme" in (await run("tenants")).stdout
    assert (await run_json("tenants"))["tenants"][0]["tenant_id"] == "acme"
    why = (await run("why", "acme", "second")).stdout
    assert "queued: it waits for room" in why
    assert "no slot is free" in why
    assert (await run_json("why", "acme", "second"))["num_earlier_here"] == 0
    assert (await client.ask(request_id="bad", sampling={"temperature": -1.0})).error is not None
    assert "INVALID_PARAMETER" in (await run("refusals", "acme")).stdout
    assert (await run("workers", key="wrong")).exit_code == 1
    assert (await run("drain-worker", "w9")).exit_code == 1
    assert (await run("drain-worker", "w1")).exit_code == 0
    assert (await run_json("drain-gateway"))["num_live"] == 2
    for call in (running, waiting):
        call.cancel()
