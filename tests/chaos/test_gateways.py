"""A gateway that is killed, stops or leaves costs its plain streams; everything that can go on elsewhere does."""

from __future__ import annotations

import asyncio

import pytest

from client import ClientError, Delta, Sampling, Text
from tests.chaos.cluster import Cluster
from tests.chaos.invariants import check_all, check_nothing_left
from tests.chaos.node import eventually
from tests.chaos.traffic import Traffic

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


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


async def test_workers_stop_what_a_killed_one_had(cluster: Cluster) -> None:
    """Long before the answers would have ended by themselves."""
    names = ("abandoned_total", "finished_total", "running", "waiting", 'blocks{state="referenced"}')

    def numbers() -> list[float]:
        return [sum(worker.metric(f"tidegate_worker_{name}") for worker in cluster.workers) for name in names]

    before = numbers()
    sampling = Sampling(temperature=0, max_tokens=2500, ignore_eos=True)
    streams = [cluster.client("regular", 0).generate(Text(f"{number}"), sampling) for number in range(4)]
    for stream in streams:
        while not isinstance(await anext(stream), Delta):
            pass
    await eventually(lambda: asyncio.to_thread(lambda: sum(numbers()[2:4]) == 4), "all four are there")
    await cluster.gateways[0].node.kill()
    after = [before[1], 0, 0, 0]

    def have_stopped() -> bool:
        now = numbers()
        return now[0] >= before[0] + 4 and now[1:] == after  # a session that a slow machine loses abandons some, too

    await eventually(lambda: asyncio.to_thread(have_stopped), f"{names} are {before[0] + 4}, {after}")
    for stream in streams:
        with pytest.raises(ClientError, match="UNAVAILABLE"):
            async for _ in stream:
                pass
    await cluster.heal()
    await check_nothing_left(cluster)


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
