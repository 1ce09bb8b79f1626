"""`python -m gateway --processes 2`: one port, two gateways."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from client import ClientError
from client.admin import AdminClient
from client.client import ClientOptions
from common.rpc.probe import wait_until_serving
from common.types import FinishReason
from gateway.config import GatewaySettings
from gateway.processes import one_of_several
from gateway.tenants import hash_key
from protos.inference.v1 import inference_pb2
from tests.integration.gateway.rig import Client, generate_request
from tests.support.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.timeout(900)

ADMIN_KEY = "operators-secret"
LIMIT_S = 240.0
NUM_CLIENTS = 24  # all of them at one of two gateways: once in eight million times


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with ScriptedWorker(step_s=None) as worker:
        yield worker


@pytest.fixture
def program(tmp_path: Path, port: int, worker: ScriptedWorker, redis_url: str, pool: str) -> Iterator[psutil.Popen]:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": [{"id": "acme", "key_sha256": hash_key("key-acme"), "band": "high"}]}))
    settings = {
        "TIDEGATE_REDIS_URL": redis_url,
        "TIDEGATE_GATEWAY_POOL": pool,
        "TIDEGATE_GATEWAY_TENANTS_FILE": str(tenants),
        "TIDEGATE_GATEWAY_WORKERS": worker.address,
        "TIDEGATE_GATEWAY_ADMIN_KEY": ADMIN_KEY,
        "TIDEGATE_GATEWAY_METRICS_LISTEN": "",
    }
    flags = ["--processes", "2", "--listen", f"127.0.0.1:{port}", "--drain-s", "1"]
    with (tmp_path / "log").open("wb") as log:
        process = psutil.Popen(
            [sys.executable, "-m", "gateway", *flags], env={**os.environ, **settings}, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended, as it should
            for each in (*process.children(recursive=True), process):
                each.kill()
        process.wait()


async def identities(port: int, *, count: int) -> dict[str, int]:
    """The ids of so many gateways that have a worker, each with the number of the connection that leads to it."""
    found: dict[str, int] = {}
    number = 0
    async with asyncio.timeout(LIMIT_S):
        while len(found) < count:
            number += 1
            options = ClientOptions(keepalive_timeout_s=20.0 + number)  # else connections would be shared
            async with AdminClient(f"127.0.0.1:{port}", ADMIN_KEY, options=options) as admin:
                with suppress(ClientError):  # one that is just gone, or not there yet
                    answer = await admin.list_workers()
                    if [worker.state for worker in answer.workers] == ["ready"]:
                        found.setdefault(answer.gateway_id, number)
    return found


async def gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=LIMIT_S)
    assert alive == []


async def test_two_gateways_share_the_port_and_each_knows_the_others_requests(
    program: psutil.Popen, port: int, worker: ScriptedWorker
) -> None:
    await asyncio.wait_for(wait_until_serving(f"127.0.0.1:{port}"), LIMIT_S)
    assert len(await identities(port, count=2)) == 2
    clients = [Client(port, options=[("test.number", number)]) for number in range(NUM_CLIENTS)]
    calls = [client.generate(generate_request(request_id=f"r{n}")) for n, client in enumerate(clients)]
    await worker.wait_for(lambda: len(worker.running) == NUM_CLIENTS)
    assert len({session.gateway_id for session in worker.sessions if session.running}) == 2
    # Whichever gateway gets the cancel: the one that holds the stream ends it.
    for number in range(NUM_CLIENTS):
        await clients[0].call("Cancel", _cancel(f"r{number}"))
    for call in calls:
        reasons = [response.finished.reason async for response in call if response.HasField("finished")]
        assert reasons == [FinishReason.CANCELLED]
    children = program.children(recursive=True)
    program.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(program.wait, LIMIT_S) == 0
    await gone(children)
    for client in clients:
        await client.channel.close()


def _cancel(request_id: str) -> Any:
    return inference_pb2.CancelRequest(request_id=request_id)


async def test_a_killed_gateway_is_replaced_and_a_killed_parent_leaves_none(program: psutil.Popen, port: int) -> None:
    await asyncio.wait_for(wait_until_serving(f"127.0.0.1:{port}"), LIMIT_S)
    before = await identities(port, count=2)
    victim = next(each for each in program.children() if "spawn_main" in " ".join(each.cmdline()))
    victim.kill()
    async with asyncio.timeout(LIMIT_S):
        while len(await identities(port, count=2) | before) < 3:
            pass
    children = program.children(recursive=True)
    program.kill()
    await gone(children)


def test_a_taken_port_is_said_in_one_line(tmp_path: Path, redis_url: str) -> None:
    with socket.socket() as taken:
        # Even by somebody who would share it.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-m", "gateway", "--processes", "2", "--listen", listen],
            env={**os.environ, "TIDEGATE_REDIS_URL": redis_url},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert ended.returncode == 1
    assert f"gateway: cannot listen at {listen}" in ended.stderr


def test_a_fault_of_one_ends_all(tmp_path: Path, redis_url: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "--processes", "2", "--listen", "127.0.0.1:0", "--tenants-file", "nowhere"],
        env={**os.environ, "TIDEGATE_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 1
    assert "nowhere" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_each_process_has_an_id_and_a_metrics_port_of_its_own() -> None:
    settings = GatewaySettings(processes=3, gateway_id="g", metrics_listen="0.0.0.0:9000")  # type: ignore[call-arg]
    ours = [one_of_several(settings, number, "127.0.0.1:7") for number in range(3)]
    assert [each.gateway_id for each in ours] == ["g-0", "g-1", "g-2"]
    assert [each.metrics_listen for each in ours] == ["0.0.0.0:9000", "0.0.0.0:9001", "0.0.0.0:9002"]
    assert {each.listen for each in ours} == {"127.0.0.1:7"}
    chosen = one_of_several(GatewaySettings(processes=2, metrics_listen=""), 1, "h:1")  # type: ignore[call-arg]
    assert (chosen.gateway_id, chosen.metrics_listen) == ("", "")
