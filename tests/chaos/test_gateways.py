"""A gateway that is killed, stops or leaves costs its plain streams; everything that can go on elsewhere does."""

from __future__ import annotations

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.invariants import check_all
from tests.chaos.node import eventually
from tests.chaos.traffic import Traffic

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]


async def test_killed_and_back_later(cluster: Cluster, traffic: Traffic) -> None:
    traffic.may_break = True
    async with traffic.running():
        await traffic.more()
        dead = cluster.gateway_ids[0]
        await cluster.gateways[0].node.kill()
        await eventually(lambda: cluster.is_reaped(dead), "what it owned is reaped")
        await traffic.more()
        await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)


async def test_killed_and_back_at_once(cluster: Cluster, traffic: Traffic) -> None:
    """Under the same name, before anybody has taken it for dead."""
    traffic.may_break = True
    async with traffic.running():
        await traffic.more()
        await cluster.gateways[0].node.kill()
        await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)


async def test_drained(cluster: Cluster, traffic: Traffic) -> None:
    traffic.may_break = True
    async with traffic.running():
        await traffic.more()
        assert await cluster.gateways[0].node.drain() == 0
        await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)


async def test_stopped_for_longer_than_its_sign_of_life_lasts(cluster: Cluster, traffic: Traffic) -> None:
    """It is reaped, and then goes on as if nothing had been."""
    traffic.may_break = True
    async with traffic.running():
        await traffic.more()
        cluster.gateways[0].node.freeze()
        await eventually(lambda: cluster.is_reaped(cluster.gateway_ids[0]), "what it owned is reaped")
        await cluster.heal()
        await traffic.more()
    await check_all(cluster, traffic)
