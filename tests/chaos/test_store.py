"""Redis that is killed, comes back empty or is out of reach of one gateway loses no accepted request."""

from __future__ import annotations

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.invariants import check_all
from tests.chaos.node import eventually
from tests.chaos.traffic import Traffic

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def test_restarted(cluster: Cluster, traffic: Traffic) -> None:
    async with traffic.running():
        await traffic.more()
        await cluster.restart_redis(empty=False)
        await traffic.more()
    await check_all(cluster, traffic)


async def test_restarted_empty(cluster: Cluster, traffic: Traffic) -> None:
    traffic.kinds = {kind: share for kind, share in traffic.kinds.items() if kind not in ("resumable", "keyed", "job")}
    async with traffic.running():
        await traffic.more()
        await cluster.restart_redis(empty=True)
        ended_before = [call for call in traffic.calls if call.finished or call.ended_at is not None]
        await traffic.more()
    await check_all(cluster, traffic, forgotten=ended_before)


async def test_out_of_reach_of_one_gateway(cluster: Cluster, traffic: Traffic) -> None:
    """For so long that the others take it for dead. Its streams go on."""
    link = cluster.gateways[0].link
    assert link is not None
    async with traffic.running():
        await traffic.more()
        link.cut()
        await eventually(lambda: cluster.is_reaped(cluster.gateway_ids[0]), "the other one takes it for dead")
        link.mend()
        await traffic.more()
    await check_all(cluster, traffic)
