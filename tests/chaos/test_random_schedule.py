"""Harm of every kind, drawn at random and laid over one another, for as long as TIDEGATE_CHAOS_S says (seconds).

TIDEGATE_CHAOS_SEED repeats a schedule: what is done to whom in which order, and for how long. A failure names its seed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.invariants import check_all
from tests.chaos.questions import Question
from tests.chaos.traffic import Traffic

DURATION_S = float(os.environ.get("TIDEGATE_CHAOS_S", "10"))
ROUND_S = 60.0  # after which everything is made whole, and every invariant is checked
pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200 + 10 * DURATION_S)]

Harm = Callable[[], Awaitable[None]]


class Schedule:
    """Draws what is harmed next. There is always a gateway and a worker that nothing is done to at the moment."""

    def __init__(self, cluster: Cluster, random: Random) -> None:
        self._cluster = cluster
        self._random = random

    async def run(self, duration_s: float) -> None:
        """Does harm for so long, then makes everything whole."""
        until = time.monotonic() + duration_s
        while time.monotonic() < until:
            worker, gateway = self._random.randrange(2), self._random.randrange(2)
            kinds = self._random.sample(["worker", "gateway", "store"], self._random.choice((1, 1, 2)))
            await asyncio.gather(*(self._draw(kind, worker, gateway) for kind in sorted(kinds)))
            await self._cluster.heal()
            await asyncio.sleep(self._random.uniform(0.2, 1.5))

    def _draw(self, kind: str, worker: int, gateway: int) -> Awaitable[None]:
        """Decides now, in the order of the drawing; the harm itself takes its time."""
        away_s = self._random.choice((0.3, 1.0, 4.0, 8.0))
        how = self._random.choice(("kill", "drain", "freeze", "cut"))
        if kind == "store":
            return self._harm_store(how, min(away_s, 4.0))
        return self._harm(kind, how, worker if kind == "worker" else gateway, away_s)

    async def _harm(self, kind: str, how: str, index: int, away_s: float) -> None:
        print(f"chaos: {how} {kind} {index} for {away_s} s", flush=True)
        server = (self._cluster.workers if kind == "worker" else self._cluster.gateways)[index]
        assert server.link is not None
        if how == "kill":
            await server.node.kill()
        elif how == "drain":
            await server.node.drain()
        elif how == "freeze":
            server.node.freeze()
        else:
            server.link.cut()
        await asyncio.sleep(away_s)

    async def _harm_store(self, how: str, away_s: float) -> None:
        print(f"chaos: {how} store for {away_s} s", flush=True)
        node = self._cluster.redis.node
        if how in ("kill", "drain"):
            await node.kill()
        else:
            node.freeze()
        await asyncio.sleep(away_s)
        node.thaw()
        await node.start()
        await node.until_ready()


async def test_random_schedule(cluster: Cluster, questions: list[Question]) -> None:
    seed = int(os.environ.get("TIDEGATE_CHAOS_SEED") or secrets.randbelow(10**6))
    print(f"TIDEGATE_CHAOS_SEED={seed} TIDEGATE_CHAOS_S={DURATION_S:g}", flush=True)
    schedule = Schedule(cluster, Random(seed))
    until = time.monotonic() + DURATION_S
    number = 0
    while (left_s := until - time.monotonic()) > 0:
        traffic = Traffic(cluster, questions, seed + number)
        traffic.may_break = True
        async with traffic.running():
            await schedule.run(min(ROUND_S, left_s))
            await traffic.more(500)
        await check_all(cluster, traffic)
        number += 1
        print(f"chaos: round {number} held, {len(traffic.calls)} calls, {traffic.num_tokens} tokens", flush=True)
