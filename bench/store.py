"""What the queue in Redis costs: latency of enqueue, dispatch and finish one by one, and claims per second at load."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from common.local_redis import redis_url
from common.types import Band, BlockUsage, ModelLimits
from gateway.queueing.queue import Claim, QueueEntry, WorkerReport
from gateway.store.redis_queue import RedisQueue

T = TypeVar("T")
NUM_SLOTS = 256
BLOCK_SIZE = 16


@dataclass
class Latencies:
    """Seconds by verb."""

    by_verb: dict[str, list[float]] = field(default_factory=dict)

    async def timed(self, verb: str, call: Awaitable[T]) -> T:
        start = time.perf_counter()
        result = await call
        self.by_verb.setdefault(verb, []).append(time.perf_counter() - start)
        return result

    def print(self) -> None:
        print(f"{'verb':<10} {'calls':>7} {'p50 µs':>8} {'p99 µs':>8}")
        for verb, taken in self.by_verb.items():
            ordered = sorted(taken)
            p50, p99 = (ordered[min(int(len(ordered) * q), len(ordered) - 1)] * 1e6 for q in (0.5, 0.99))
            print(f"{verb:<10} {len(ordered):>7} {p50:>8.0f} {p99:>8.0f}")


def make_entry(owner: str, i: int) -> QueueEntry:
    return QueueEntry(f"bench/{owner}/{i}", owner, "m", "bench", Band(1 + i % 3), 200, 400)


class Fleet:
    """Workers that are always as empty as the claims of the present round leave them."""

    def __init__(self, num_workers: int) -> None:
        self._seq = 0
        self._num_workers = num_workers

    def reports(self) -> list[WorkerReport]:
        self._seq += 1
        limits = ModelLimits("m", 8192, 50_000, BLOCK_SIZE, NUM_SLOTS * 64, NUM_SLOTS)
        usage = BlockUsage(self._seq, NUM_SLOTS * 64, 0, 0, 0, 0, 0, NUM_SLOTS)
        return [WorkerReport(f"w{i}", 1, limits, usage) for i in range(self._num_workers)]


async def one_by_one(queue: RedisQueue, fleet: Fleet, num_requests: int) -> Latencies:
    """A lone request's way: enqueue, a dispatch with a report, finish."""
    latencies = Latencies()
    for i in range(num_requests):
        item = make_entry("g0", i)
        await latencies.timed("enqueue", queue.enqueue(item, max_length=10**6))
        claims = await latencies.timed("dispatch", queue.dispatch(fleet.reports()))
        if [claim.request_id for claim in claims] != [item.request_id]:
            raise RuntimeError(f"{item.request_id} was not claimed alone: {claims}")
        await latencies.timed("finish", queue.finish(item.request_id))
    return latencies


async def at_load(queues: list[RedisQueue], fleet: Fleet, num_requests: int) -> dict[str, float]:
    """Seconds that all gateways together need to enqueue, claim and finish the requests, each phase by itself."""
    start = time.perf_counter()
    await asyncio.gather(
        *(
            queue.enqueue(make_entry(f"g{n}", i), max_length=10**6)
            for n, queue in enumerate(queues)
            for i in range(num_requests // len(queues))
        )
    )
    enqueued = time.perf_counter()
    finishing = 0.0
    num_claims = 0
    while num_claims < num_requests // len(queues) * len(queues):
        rounds = await asyncio.gather(*(queue.dispatch(fleet.reports()) for queue in queues))
        claims: list[Claim] = [claim for claims in rounds for claim in claims]
        num_claims += len(claims)
        begun = time.perf_counter()
        await asyncio.gather(*(queues[int(claim.owner[1:])].finish(claim.request_id) for claim in claims))
        finishing += time.perf_counter() - begun
    return {
        "enqueue": enqueued - start,
        "claim": time.perf_counter() - enqueued - finishing,
        "finish": finishing,
    }


async def main(url: str, *, num_requests: int, num_gateways: int, num_workers: int) -> None:
    pool = f"bench-{secrets.token_hex(4)}"
    queues = [RedisQueue(url, pool=pool, gateway_id=f"g{i}") for i in range(num_gateways)]
    fleet = Fleet(num_workers)
    for queue in queues:
        await queue.heartbeat(ttl_s=3600)
    try:
        print(f"one request at a time, {num_workers} workers reporting with every dispatch")
        (await one_by_one(queues[0], fleet, num_requests)).print()
        print(f"{num_requests} requests queued at once by {num_gateways} gateways of one process")
        for verb, seconds in (await at_load(queues, fleet, num_requests)).items():
            print(f"{verb:<10} {num_requests / seconds:>9.0f} /s")
    finally:
        for queue in queues:
            await queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    with redis_url(os.environ.get("TIDEGATE_REDIS_URL")) as found:
        asyncio.run(
            main(
                found,
                num_requests=options.requests,
                num_gateways=options.gateways,
                num_workers=options.workers,
            )
        )
