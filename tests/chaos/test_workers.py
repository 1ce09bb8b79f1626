"""Workers that are killed, stop, vanish from the network or restart cost their requests a pause, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tests.chaos.cluster import Cluster, Server
from tests.chaos.invariants import Counts, check_all, check_worker_counters
from tests.chaos.namespace import Namespace, reason_against_namespaces
from tests.chaos.node import eventually
from tests.chaos.traffic import Traffic

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


def _cut(worker: Server) -> None:
    assert worker.link is not None
    worker.link.cut()


async def test_no_harm(cluster: Cluster, traffic: Traffic) -> None:
    before = Counts.read(cluster)
    async with traffic.running():
        await traffic.more(3000)
    await check_all(cluster, traffic)
    await check_worker_counters(cluster, before)


async def test_killed(cluster: Cluster, traffic: Traffic) -> None:
    async with traffic.running():
        await traffic.more()
        await cluster.workers[0].node.kill()
        await cluster.until_seen(1)
        await traffic.more()
        await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)


@pytest.mark.parametrize("harm", [lambda worker: worker.node.freeze(), _cut], ids=["stopped", "black hole"])
async def test_silent(cluster: Cluster, traffic: Traffic, harm: Callable[[Server], None]) -> None:
    async with traffic.running():
        await traffic.more()
        harm(cluster.workers[0])
        harmed_at = datetime.now(UTC)
        await cluster.until_seen(1)
        for gateway in cluster.gateways:
            for event in gateway.node.events("worker_silent")[-1:]:
                noticed_at = datetime.fromisoformat(event["timestamp"])
                print(f"{gateway.node.name} noticed it after {(noticed_at - harmed_at).total_seconds():.2f} s")
        await traffic.more()
        await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)


async def test_rolling_restart(cluster: Cluster, traffic: Traffic) -> None:
    async with traffic.running():
        for worker in cluster.workers:
            await traffic.more()
            assert await worker.node.drain() == 0
            await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)


async def test_packets_lost_in_a_network_namespace(cluster: Cluster, traffic: Traffic) -> None:
    if reason := reason_against_namespaces():
        pytest.skip(reason)
    with Namespace() as namespace:
        far = await cluster.add_worker_in(namespace)

        def is_busy() -> bool:
            return far.metric("tidegate_worker_running") > 1

        try:
            async with traffic.running():
                await eventually(lambda: asyncio.to_thread(is_busy), "the far worker is busy")
                namespace.cut()
                await cluster.until_seen(len(cluster.workers) - 1)
                await traffic.more()
                namespace.mend()
                await cluster.until_seen(len(cluster.workers))
                await traffic.more()
            await check_all(cluster, traffic)
        finally:
            await cluster.remove_worker(far)
