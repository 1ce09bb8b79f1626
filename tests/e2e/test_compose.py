"""The compose deployment, really built and started, where a Docker engine answers."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from client import Chat, Client, Message, Sampling
from common.types import FinishReason
from launcher.ports import free_ports
from tests.architecture.source_tree import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]

KEY = "development-key-high"
WAIT_S = 60.0


class Compose:
    """One compose project of its own name and ports."""

    def __init__(self) -> None:
        self.project = f"tidegate-test-{secrets.token_hex(3)}"
        gateway, metrics = free_ports(2)
        self.address = f"127.0.0.1:{gateway}"
        self._env = os.environ | {
            "TIDEGATE_PORT": str(gateway),
            "TIDEGATE_METRICS_PORT": str(metrics),
            "TIDEGATE_WORKER_KV_CACHE_MIB": "128",
        }

    def __call__(self, *arguments: str) -> str:
        """Runs `docker compose` and returns what it printed; fails the test if it fails."""
        done = self._run(*arguments)
        if done.returncode != 0:
            logs = self._run("logs", "--tail", "20").stdout
            pytest.fail(f"docker compose {' '.join(arguments)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{logs}")
        return done.stdout

    def containers(self) -> list[str]:
        """Names of all containers of the project, running or not."""
        command = ["docker", "ps", "--all", "--format", "{{.Names}}"]
        command += ["--filter", f"label=com.docker.compose.project={self.project}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", "--project-name", self.project, *arguments]
        return subprocess.run(command, cwd=ROOT, env=self._env, capture_output=True, text=True, check=False)


def why_not() -> str:
    """Why this cannot run here; empty if it can."""
    if shutil.which("docker") is None:
        return "no Docker here: there is no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            return f"no Docker engine answers to `{' '.join(command)}`: {lines[-1] if lines else 'no reason given'}"
    return ""


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if reason := why_not():
        pytest.skip(reason)
    project = Compose()
    try:
        yield project
    finally:
        project("down", "--volumes", "--remove-orphans")
        assert project.containers() == []


def test_up_builds_starts_in_order_and_a_client_on_the_host_chats(compose: Compose) -> None:
    compose("up", "--build", "--detach", "--wait")
    asyncio.run(chat(compose.address))


def test_workers_scale_and_are_found(compose: Compose) -> None:
    compose("up", "--detach", "--wait", "--scale", "worker=2")
    asyncio.run(until_workers(compose.address, 2))
    asyncio.run(chat(compose.address))


def test_programs_run_as_nobody_special_and_the_gateway_without_torch(compose: Compose) -> None:
    for service in ("gateway", "worker"):
        assert compose("exec", "-T", service, "id", "-u").strip() == "10001"
    find_torch = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numba'))"
    assert compose("exec", "-T", "gateway", "python", "-c", find_torch).strip() == "None None"


async def chat(address: str) -> None:
    async with Client(address, KEY) as client:
        question = Chat([Message("user", "What is the capital of France? Answer in one sentence.")])
        answer = await client.complete(question, Sampling(temperature=0, max_tokens=40), timeout_s=WAIT_S)
    assert "Paris" in answer.text
    assert answer.reason in (FinishReason.STOP, FinishReason.LENGTH)


async def until_workers(address: str, count: int) -> None:
    async with Client(address, KEY) as client, asyncio.timeout(WAIT_S):
        while [model.num_workers for model in await client.list_models()] != [count]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
