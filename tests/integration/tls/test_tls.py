"""TLS and mTLS of gateways, workers and clients, with the real programs' own wiring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from client import Client, ClientError, ClientOptions, Finished, Sampling, Text
from client.admin import AdminClient
from client.cli import app as cli
from common.rpc import probe
from common.rpc.tls import Dialling, channel_credentials
from gateway.app import GatewayApp
from tests.integration.gateway.rig import FLEET_KEY, Rig, eventually
from tests.integration.tls.certificates import Authority, Certificate
from worker.app import Worker
from worker.config import WorkerSettings

ADMIN_KEY = "operators-secret"
REFUSED = "UNAVAILABLE"  # what a handshake that fails looks like on either side; it comes without a reason of ours


@dataclass
class Deployment:
    """A gateway and a worker that trust `ours` only, and ask everybody for a certificate of it."""

    gateway: GatewayApp
    worker_address: str
    worker_run: asyncio.Task[None]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.gateway.port}"


@pytest.fixture(scope="session")
def server(ours: Authority) -> Certificate:
    return ours.sign("server")


@pytest.fixture(scope="session")
def caller(ours: Authority) -> Certificate:
    return ours.sign("caller", "DNS:caller")


def tls_settings(ours: Authority, server: Certificate, caller: Certificate) -> dict[str, str]:
    """Settings of a program whose server asks for certificates, and that shows its own when it dials."""
    return {
        "tls_cert": server.cert,
        "tls_key": server.key,
        "tls_client_ca": ours.ca,
        "fleet_tls_ca": ours.ca,
        "fleet_tls_cert": caller.cert,
        "fleet_tls_key": caller.key,
    }


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await task


@pytest.fixture
async def deployment(
    rig: Rig, ours: Authority, server: Certificate, caller: Certificate, model_folder: Path
) -> AsyncIterator[Deployment]:
    """The worker finds the gateway by its announcement: both directions are dialled with mTLS."""
    tls = tls_settings(ours, server, caller)
    gateway = await rig.gateway(admin_key=ADMIN_KEY, **tls)
    settings = {
        "model": str(model_folder),
        "model_name": "small",
        "kernels": "reference",
        "dtype": "float32",
        "kv_cache_mib": 4,
        "threads": 1,
        "worker_id": "w1",
        "metrics_listen": "",
        "gateways": f"127.0.0.1:{gateway.port}",
        **tls,
    }
    worker = Worker(WorkerSettings(**settings, TIDEGATE_FLEET_KEY=FLEET_KEY))  # type: ignore[call-arg, arg-type]
    async with running(worker) as task:
        await eventually(lambda: gateway.fleet.is_ready or task.done(), 120)
        (record,) = await gateway.queue.workers()
        yield Deployment(gateway, record.address, task)


def credentials(ca: Authority, shown: Certificate | None) -> grpc.ChannelCredentials:
    return channel_credentials(ca.ca, shown.cert if shown else "", shown.key if shown else "")


async def ask(address: str, **kwargs: Any) -> int:
    """Completion tokens of a small answer."""
    async with Client(address, "key-acme", **kwargs) as client:
        sampling = Sampling(max_tokens=4, ignore_eos=True, temperature=0.0)
        events = [event async for event in client.generate(Text("hello"), sampling, timeout_s=60)]
    assert isinstance(events[-1], Finished)
    return events[-1].usage.completion_tokens


async def test_who_shows_a_trusted_certificate_chats_and_nobody_else(
    deployment: Deployment, ours: Authority, theirs: Authority, caller: Certificate
) -> None:
    assert await ask(deployment.address, credentials=credentials(ours, caller)) == 4
    strangers = [
        {},  # plain text
        {"credentials": credentials(ours, None)},  # shows no certificate
        {"credentials": credentials(ours, theirs.sign("stranger", "DNS:caller"))},  # shows another authority's
        {"credentials": credentials(theirs, caller)},  # does not trust the gateway
    ]
    for kwargs in strangers:
        with pytest.raises(ClientError) as caught:
            await ask(deployment.address, **kwargs)
        assert (caught.value.status, caught.value.reason) == (REFUSED, None)
    assert await ask(deployment.address, credentials=credentials(ours, caller)) == 4


async def test_a_worker_refuses_who_shows_no_trusted_certificate(
    deployment: Deployment, ours: Authority, theirs: Authority, caller: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CHECK_TIMEOUT_S", 60.0)
    address = deployment.worker_address
    assert await probe.check(address, "", Dialling(credentials(ours, caller))) == "SERVING"
    strangers = [
        Dialling(),
        Dialling(credentials(ours, None)),
        Dialling(credentials(ours, theirs.sign("stranger2"))),
        Dialling(credentials(theirs, caller)),
    ]
    for dialling in strangers:
        assert await probe.check(address, "", dialling) == REFUSED


async def test_a_gateway_that_trusts_another_authority_gets_no_worker(
    rig: Rig, deployment: Deployment, theirs: Authority, caller: Certificate
) -> None:
    wrong = await rig.gateway(
        workers=deployment.worker_address,
        fleet_tls_ca=theirs.ca,
        fleet_tls_cert=caller.cert,
        fleet_tls_key=caller.key,
        connect_timeout_s=1.0,
    )
    plain = await rig.gateway(workers=deployment.worker_address, connect_timeout_s=1.0)
    for gateway in (wrong, plain):
        async with Client(f"127.0.0.1:{gateway.port}", "key-acme") as client:
            with pytest.raises(ClientError) as caught:
                await client.complete(Text("hello"), timeout_s=60)
        assert caught.value.status == "UNAVAILABLE"
        assert not gateway.fleet.sessions


async def test_without_client_authorities_no_certificate_is_asked_for(
    rig: Rig, ours: Authority, theirs: Authority, server: Certificate
) -> None:
    scripted = await rig.worker()
    app = await rig.gateway(scripted, tls_cert=server.cert, tls_key=server.key)
    await eventually(lambda: app.fleet.is_ready)
    address = f"127.0.0.1:{app.port}"
    assert await ask(address, credentials=credentials(ours, None)) == 4
    for kwargs in ({}, {"credentials": credentials(theirs, None)}):
        with pytest.raises(ClientError) as caught:
            await ask(address, **kwargs)
        assert caught.value.status == REFUSED


async def test_the_name_in_the_certificate_counts(rig: Rig, ours: Authority) -> None:
    scripted = await rig.worker()
    named = ours.sign("named", "DNS:gateway.example")
    app = await rig.gateway(scripted, tls_cert=named.cert, tls_key=named.key)
    await eventually(lambda: app.fleet.is_ready)
    address = f"127.0.0.1:{app.port}"
    with pytest.raises(ClientError):
        await ask(address, credentials=credentials(ours, None))
    options = ClientOptions(server_name="gateway.example")
    assert await ask(address, credentials=credentials(ours, None), options=options) == 4


async def test_an_operator_drains_a_worker_which_then_ends(
    deployment: Deployment, ours: Authority, caller: Certificate
) -> None:
    async with AdminClient(deployment.address, ADMIN_KEY, credentials=credentials(ours, caller)) as admin:
        assert [worker.state for worker in (await admin.list_workers()).workers] == ["ready"]
        await admin.drain_worker("w1")
        await asyncio.wait_for(asyncio.shield(deployment.worker_run), 60)
        await eventually(lambda: not deployment.gateway.fleet.sessions)


async def test_the_command_line_shows_its_certificate(
    deployment: Deployment, ours: Authority, caller: Certificate
) -> None:
    files = ["--tls-ca", ours.ca, "--tls-cert", caller.cert, "--tls-key", caller.key]
    health = ["health", "--address", deployment.address]
    run = CliRunner().invoke
    # In a thread: the command has an event loop of its own, and the gateway lives in this one.
    answered = await asyncio.to_thread(run, cli, [*files, *health])
    assert (answered.exit_code, answered.stdout.splitlines()[-1]) == (0, "SERVING")
    refused = await asyncio.to_thread(run, cli, [*files[:2], *health])
    assert refused.exit_code == 3
    unreadable = await asyncio.to_thread(run, cli, ["--tls-ca", caller.key, *health])
    assert unreadable.exit_code == 2
    assert "--tls-ca" in unreadable.stderr
