"""What queue and limits in Redis cost: latency one by one, rates and server time of each verb at load."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from common.clock import SystemClock
from common.local_redis import redis_url
from common.types import Band, BlockUsage, ModelLimits
from gateway.admission.limiter import Cost
from gateway.admission.limits import TenantLimits
from gateway.queueing.queue import Claim, QueueEntry, WorkerReport
from gateway.store.connection import connect
from gateway.store.redis_limiter import RedisLimiter
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


class Phases:
    """Seconds by the clock and seconds of the server's processor, by phase."""

    def __init__(self, read_cpu_s: Callable[[], Awaitable[float]]) -> None:
        self._read_cpu_s = read_cpu_s
        self.taken: dict[str, tuple[float, float]] = {}

    async def _now(self) -> tuple[float, float]:
        return time.perf_counter(), await self._read_cpu_s()

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        start_s, start_cpu_s = await self._now()
        yield
        end_s, end_cpu_s = await self._now()
        taken_s, taken_cpu_s = self.taken.get(name, (0.0, 0.0))
        self.taken[name] = taken_s + end_s - start_s, taken_cpu_s + end_cpu_s - start_cpu_s


async def at_load(queues: list[RedisQueue], fleet: Fleet, num_requests: int, phases: Phases) -> None:
    """All gateways together enqueue, claim and finish the requests, each phase by itself."""
    async with phases.phase("enqueue"):
        await enqueue_all(queues, num_requests)
    num_claims = 0
    while num_claims < num_requests // len(queues) * len(queues):
        async with phases.phase("claim"):
            rounds = await asyncio.gather(*(queue.dispatch(fleet.reports()) for queue in queues))
        claims: list[Claim] = [claim for claims in rounds for claim in claims]
        num_claims += len(claims)
        async with phases.phase("finish"):
            await asyncio.gather(*(queues[int(claim.owner[1:])].finish(claim.request_id) for claim in claims))


async def enqueue_all(queues: list[RedisQueue], num_requests: int) -> None:
    await asyncio.gather(
        *(
            queue.enqueue(make_entry(f"g{n}", i), max_length=10**6)
            for n, queue in enumerate(queues)
            for i in range(num_requests // len(queues))
        )
    )


async def limits_at_load(limiter: RedisLimiter, num_requests: int, phases: Phases) -> None:
    """The requests of a tenant with every limit are admitted and settled, each phase by itself."""
    most = 10**9
    limits = TenantLimits(
        requests_per_minute=most, tokens_per_minute=most, max_concurrent=most, tokens_per_day=most, time_zone="UTC"
    )
    ids = [f"bench/{i}" for i in range(num_requests)]
    async with phases.phase("reserve"):
        await asyncio.gather(*(limiter.reserve("bench", request_id, Cost(200, 200), limits) for request_id in ids))
    async with phases.phase("renew"):
        await limiter.renew()
    async with phases.phase("settle"):
        await asyncio.gather(
            *(limiter.settle("bench", request_id, num_prompt_tokens=200, num_output_tokens=50) for request_id in ids)
        )


async def main(url: str, *, num_requests: int, num_gateways: int, num_workers: int) -> None:
    pool = f"bench-{secrets.token_hex(4)}"
    queues = [RedisQueue(url, pool=pool, gateway_id=f"g{i}") for i in range(num_gateways)]
    limiter = RedisLimiter(url, pool=pool, gateway_id="bench", clock=SystemClock(), uniform=lambda low, _: low)
    fleet = Fleet(num_workers)
    server = connect(url, max_connections=1, timeout_s=5.0)

    async def server_cpu_s() -> float:
        cpu = await server.info("cpu")
        return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

    for queue in queues:
        await queue.heartbeat(ttl_s=3600)
    try:
        print(f"one request at a time, {num_workers} workers reporting with every dispatch")
        (await one_by_one(queues[0], fleet, num_requests)).print()
        print(f"{num_requests} requests queued at once by {num_gateways} gateways of one process")
        phases = Phases(server_cpu_s)
        await at_load(queues, fleet, num_requests, phases)
        await limits_at_load(limiter, num_requests, phases)
        print(f"{'verb':<10} {'per s':>9} {'server µs':>10}")
        for verb, (seconds, cpu_seconds) in phases.taken.items():
            print(f"{verb:<10} {num_requests / seconds:>9.0f} {cpu_seconds / num_requests * 1e6:>10.1f}")
    finally:
        await limiter.close()
        await server.aclose()
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
