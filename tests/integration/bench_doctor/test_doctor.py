"""A gateway, a worker process with a small model, and their real endpoints."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner, Result

from bench.__main__ import app as bench
from bench.doctor import facts
from bench.doctor.diagnosis import Cause, diagnose
from bench.doctor.snapshot import Snapshot, read
from bench.in_process import EngineOptions, build_runner
from bench.levels import RealMachine
from common.metrics import GatewayMetrics, MetricsServer, WorkerMetrics
from common.rpc.probe import wait_until_serving
from common.types import Band
from gateway.admission.limits import TenantLimits
from gateway.tenants import Tenant
from launcher.ports import free_ports
from launcher.process import Child
from tests.integration.gateway.rig import FLEET_KEY, Client, Rig, eventually, reason_of
from tests.support.models import random_model, save_folder
from tests.unit.bench.doctor.clinic import Bounds, Patient
from worker.model.weights import load_model

pytestmark = pytest.mark.timeout(600)

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 4, 64
A_MINUTE_S = 60.0


@dataclass(frozen=True)
class Deployment:
    """Its endpoints as host:port, and a tenant with three requests a minute."""

    worker: str
    gateway: str
    client: Client

    async def look(self, at_s: float) -> Snapshot:
        return await asyncio.to_thread(read, [self.worker], [self.gateway], at_s)


@pytest.fixture
async def deployment(rig: Rig, tmp_path: Path) -> AsyncIterator[Deployment]:
    listen, metrics, gateway_metrics = (f"127.0.0.1:{port}" for port in free_ports(3))
    settings = {
        "model": str(save_folder(random_model("llama"), tmp_path / "model")),
        "model_name": "tiny",
        "listen": listen,
        "metrics_listen": metrics,
        "kernels": "reference",
        "dtype": "float32",
        "threads": "1",
        "kv_cache_mib": "2",
        "max_num_seqs": str(MAX_NUM_SEQS),
        "max_num_batched_tokens": str(MAX_NUM_BATCHED_TOKENS),
        "drain_s": "0.3",
    }
    env = {f"TIDEGATE_WORKER_{name.upper()}": value for name, value in settings.items()}
    env |= os.environ | {"TIDEGATE_FLEET_KEY": FLEET_KEY}
    child = await Child.start("worker", [sys.executable, "-m", "worker"], env, tmp_path)
    try:
        async with asyncio.timeout(240):
            await wait_until_serving(listen)
        tenants = {"key-acme": Tenant("acme", Band.NORMAL, 1, TenantLimits(requests_per_minute=3))}
        app = await rig.gateway(workers=listen, tenants_by_key=tenants, metrics_listen=gateway_metrics)
        await eventually(lambda: app.fleet.num_ready("tiny") == 1)
        yield Deployment(metrics, gateway_metrics, await rig.client(app))
    finally:
        await child.stop(drain_s=10)


async def test_a_live_deployment_is_diagnosed(deployment: Deployment) -> None:
    client = deployment.client
    before = await deployment.look(0.0)
    first = await client.ask("hello", sampling={"max_tokens": 4})
    assert first.error is None
    after = await deployment.look(A_MINUTE_S)
    found = diagnose(before, after).found
    assert found.cause is Cause.IDLE
    bounds = facts.Bounds.of(after)
    assert (bounds.max_num_seqs, bounds.max_num_batched_tokens) == (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    assert (bounds.step_budget_s, bounds.first_chunk_s) == (0.05, 0.1), "the worker's defaults"
    assert "0.0 requests waited" in found.figures

    answers = await asyncio.gather(*(client.ask("hello", sampling={"max_tokens": 4}) for _ in range(8)))
    assert [reason_of(answer.error) for answer in answers if answer.error] == ["REQUEST_RATE"] * 6
    found = diagnose(after, await deployment.look(2 * A_MINUTE_S)).found
    assert found.cause is Cause.RATE_LIMIT
    assert "refused 6 of 8 requests" in found.figures
    assert "requests_per_minute" in found.change


def test_a_real_model_that_computes_all_the_time_with_all_bounds_far_away_is_compute_bound(tmp_path: Path) -> None:
    vocab_size = 2000
    model = load_model(save_folder(random_model("llama", vocab_size=vocab_size), tmp_path / "model"), torch.float32)
    runner = build_runner(model, EngineOptions(backend="reference", num_blocks=1025, num_threads=1))
    bounds = Bounds(max_num_seqs=64, max_num_batched_tokens=512, step_budget_s=600.0, first_chunk_s=600.0)
    patient = Patient(bounds, machine=RealMachine(runner), vocab_size=vocab_size)
    patient.live(0.5, 8, (20, 40))
    before = patient.snapshot()
    patient.live(2.0, 8, (20, 40))
    diagnosis = diagnose(before, patient.snapshot())
    assert diagnosis.found.cause is Cause.COMPUTE, [each.figures for each in diagnosis.answers]


def test_the_command_reads_endpoints_and_says_what_it_is() -> None:
    worker, gateway = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(worker)
    GatewayMetrics(gateway)
    with MetricsServer("127.0.0.1:0", worker) as first, MetricsServer("127.0.0.1:0", gateway) as second:
        addresses = [f"127.0.0.1:{server.port}" for server in (first, second)]
        good = run("--worker", addresses[0], "--gateway", addresses[1], "--interval", "0.5")
        swapped = run("--worker", addresses[1], "--interval", "0.5")
    gone = run("--worker", addresses[0], "--interval", "0.5")
    assert good.exit_code == 0
    assert "1. Is the device busy? this is it" in good.output
    assert "6. Is it compute-bound? not this" in good.output
    assert "Diagnosis: the device is not busy" in good.output
    assert swapped.exit_code == gone.exit_code == 1
    assert f"{addresses[1]} is not a worker's endpoint" in swapped.output.replace("\n", " ")
    assert f"worker {addresses[0]} cannot be read" in gone.output.replace("\n", " ")


def run(*arguments: str) -> Result:
    """The command's result, with both of its outputs."""
    return CliRunner().invoke(bench, ["doctor", *arguments])
