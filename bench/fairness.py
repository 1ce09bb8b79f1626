"""Replays a trace of competing clients through the real queue, first come first served and fair, on a simulated worker.

The trace is a CSV with columns arrival_s, client, prompt_tokens, output_tokens. Time is the simulation's own, also for
the queue's scripts. The measure of fairness is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024), section 5: in windows of 60 s a client's service is (prompt + 2 * output tokens) / 60 per second, spread evenly
over the time in which its requests are answered; its demand is the same of the requests that arrive; the service
difference is the sum over clients of min(greatest service - its service, |its demand - its service|).
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

from common.local_redis import redis_url
from common.types import Band, BlockUsage, ClaimRef, ModelLimits
from gateway.queueing.queue import Claim, Flow, QueueEntry, WorkerReport
from gateway.store.connection import connect, read_script
from gateway.store.redis_queue import QueueSettings, RedisQueue

BLOCK_SIZE = 16
WINDOW_S = 60
NUM_WINDOWS = 100
CHARGE_S = 0.25
HOUR_S = 3600.0
NO_LIMIT = 10**6
_CLOCK = "local function read_clock() return tonumber(redis.call('GET', ARGV[1] .. 'clock')) end\n"


@dataclass
class Request:
    """One of the trace, and what became of it."""

    request_id: str
    client: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: float = 0.0
    end_s: float = 0.0
    num_made: int = 0

    @property
    def cost(self) -> int:
        return self.prompt_tokens + 2 * self.output_tokens


@dataclass(frozen=True)
class Speed:
    """A worker: seconds of a step are linear in its requests and in the prompt tokens that start in it."""

    step_s: float = 0.0387
    request_s: float = 0.00014
    prompt_token_s: float = 0.000235
    pool_tokens: int = 14_000  # a request holds all that it will need from its start
    max_num_seqs: int = 64


def read_trace(path: Path, num_requests: int | None) -> list[Request]:
    """The requests by arrival."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))[:num_requests]
    return [
        Request(
            f"bench/{i}",
            row["client"],
            float(row["arrival_s"]),
            int(row["prompt_tokens"]),
            int(row["output_tokens"]),
        )
        for i, row in enumerate(rows)
    ]


@dataclass
class Worker:
    """Every running request makes a token in each step."""

    speed: Speed
    seq: int = 0
    running: dict[str, Request] = field(default_factory=dict)
    starting: list[Request] = field(default_factory=list)
    unaccounted: list[Claim] = field(default_factory=list)

    def report(self) -> WorkerReport:
        self.seq += 1
        num_blocks = self.speed.pool_tokens // BLOCK_SIZE
        free = num_blocks - sum(blocks_of(request) for request in self.running.values())
        num_free_slots = self.speed.max_num_seqs - len(self.running)
        accounted = tuple(ClaimRef(claim.request_id, claim.attempt) for claim in self.unaccounted)
        self.unaccounted.clear()
        usage = BlockUsage(self.seq, free, 0, num_blocks - free, 0, len(self.running), 0, num_free_slots, accounted)
        limits = ModelLimits("m", 4096, 32_000, BLOCK_SIZE, num_blocks, self.speed.max_num_seqs)
        return WorkerReport("w", 1, limits, usage)

    def take(self, claim: Claim, request: Request) -> None:
        self.running[request.request_id] = request
        self.starting.append(request)
        self.unaccounted.append(claim)

    def step(self, now_s: float) -> tuple[float, list[Request]]:
        """The time after the step, and the requests that ended with it."""
        speed = self.speed
        prompt_tokens = sum(request.prompt_tokens for request in self.starting)
        now_s += speed.step_s + speed.request_s * len(self.running) + speed.prompt_token_s * prompt_tokens
        for request in self.starting:
            request.first_token_s = now_s
        self.starting.clear()
        ended = []
        for request in self.running.values():
            request.num_made += 1
            if request.num_made >= request.output_tokens:
                request.end_s = now_s
                ended.append(request)
        for request in ended:
            del self.running[request.request_id]
        return now_s, ended


def blocks_of(request: Request) -> int:
    return -(-(request.prompt_tokens + request.output_tokens) // BLOCK_SIZE)


class Replay:
    """One pass through the trace."""

    def __init__(self, url: str, speed: Speed, *, is_fair: bool, settings: QueueSettings) -> None:
        pool = f"bench-{secrets.token_hex(4)}"
        self._clock_key = f"tidegate:{{{pool}}}:clock"
        self._clock = connect(url, max_connections=1, timeout_s=5.0)
        self._is_fair = is_fair
        self._worker = Worker(speed)
        self._unpaid: Counter[Flow] = Counter()
        self._has_ended = False
        self._queue = RedisQueue(url, pool=pool, gateway_id="g", settings=settings, read_script=_read_script)

    async def _set_clock(self, now_s: float) -> None:
        await self._clock.set(self._clock_key, round((1e9 + now_s) * 1e6))

    def _entry(self, request: Request) -> QueueEntry:
        tenant = request.client if self._is_fair else "everyone"
        tokens = request.prompt_tokens + request.output_tokens
        return QueueEntry(request.request_id, "g", "m", tenant, Band.NORMAL, request.prompt_tokens, tokens)

    async def run(self, trace: Sequence[Request]) -> None:
        """Fills in the requests' times."""
        by_id = {request.request_id: request for request in trace}
        coming = sorted(trace, key=lambda request: -request.arrival_s)
        now_s = charged_s = 0.0
        num_left = len(trace)
        await self._set_clock(now_s)
        await self._queue.heartbeat(ttl_s=1e6)
        while num_left:
            await self._set_clock(now_s)
            is_changed = False
            while coming and coming[-1].arrival_s <= now_s:
                await self._queue.enqueue(self._entry(coming.pop()), max_length=NO_LIMIT)
                is_changed = True
            if now_s - charged_s >= CHARGE_S:
                await self._queue.charge(self._unpaid)
                self._unpaid.clear()
                charged_s = now_s
            if is_changed or self._worker.unaccounted or self._worker.seq == 0 or self._has_ended:
                for claim in await self._queue.dispatch([self._worker.report()]):
                    self._worker.take(claim, by_id[claim.request_id])
            if not self._worker.running:
                now_s = coming[-1].arrival_s
                continue
            for request in self._worker.running.values():
                self._unpaid[self._entry(request).flow] += 1
            now_s, ended = self._worker.step(now_s)
            self._has_ended = bool(ended)
            for request in ended:
                await self._queue.finish(request.request_id)
            num_left -= len(ended)
        await self._queue.close()
        await self._clock.delete(self._clock_key)
        await self._clock.aclose()


def _read_script(name: str) -> str:
    return _CLOCK if name == "clock" else read_script(name)


def service_differences(trace: Sequence[Request]) -> list[float]:
    """The service difference, in weighted tokens per second, at evenly spaced moments of the trace."""
    clients = sorted({request.client for request in trace})
    index = np.array([clients.index(request.client) for request in trace])
    arrival, start, end, cost = (
        np.array([getattr(request, name) for request in trace], dtype=float)
        for name in ("arrival_s", "first_token_s", "end_s", "cost")
    )
    differences = []
    for moment in np.arange(NUM_WINDOWS) * arrival.max() / NUM_WINDOWS:
        low, high = moment - WINDOW_S / 2, moment + WINDOW_S / 2
        answered = np.clip(np.minimum(high, end) - np.maximum(low, start), 0, None) / np.maximum(end - start, 1e-5)
        demanded = (low <= arrival) & (arrival <= high)
        service = np.bincount(index, cost * answered, len(clients)) / WINDOW_S
        demand = np.bincount(index, cost * demanded, len(clients)) / WINDOW_S
        differences.append(float(np.minimum(service.max() - service, np.abs(demand - service)).sum()))
    return differences


def summary(name: str, trace: Sequence[Request]) -> str:
    """One row of the table."""
    ttft = defaultdict(list)
    for request in trace:
        ttft[request.client].append(request.first_token_s - request.arrival_s)
    differences = service_differences(trace)
    tokens_per_s = sum(request.prompt_tokens + request.output_tokens for request in trace) / max(
        request.end_s for request in trace
    )
    all_ttfts = [value for values in ttft.values() for value in values]
    by_client = median(median(values) for values in ttft.values())
    numbers = (max(differences), mean(differences), tokens_per_s, by_client, median(all_ttfts), max(all_ttfts))
    return f"{name:<22}" + "".join(f"{number:>12.2f}" for number in numbers)


def plot(path: Path, replays: dict[str, list[Request]]) -> None:
    """Cumulative service of each client over time, one panel for each replay."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(replays), 4))
    for axes, (name, trace) in zip(figure.subplots(1, len(replays), sharey=True), replays.items(), strict=True):
        times = np.linspace(0, max(request.end_s for request in trace), 300)
        for client in sorted({request.client for request in trace}):
            service = np.zeros_like(times)
            for request in (request for request in trace if request.client == client):
                taken_s = max(request.end_s - request.first_token_s, 1e-5)
                service += request.cost * np.clip((times - request.first_token_s) / taken_s, 0, 1)
            axes.plot(times, service, linewidth=0.8)
        axes.set(title=name, xlabel="time (s)", ylabel="service (prompt + 2 output tokens)")
    figure.savefig(path, bbox_inches="tight")


async def main(url: str, options: argparse.Namespace) -> None:
    """Replays both ways and prints the table."""
    settings = QueueSettings(
        claim_lease_s=HOUR_S,
        report_ttl_s=HOUR_S,
        long_wait_s=options.long_wait_s,
        claims_per_long_wait=options.claims_per_long_wait,
    )
    print(f"{'':<22}{'max diff':>12}{'mean diff':>12}{'tokens/s':>12}{'client TTFT':>12}{'TTFT':>12}{'max TTFT':>12}")
    replays = {}
    for name, is_fair in (("first come first served", False), ("fair", True)):
        trace = read_trace(options.trace, options.requests)
        await Replay(url, Speed(pool_tokens=options.pool_tokens), is_fair=is_fair, settings=settings).run(trace)
        replays[name] = trace
        print(summary(name, trace), flush=True)
    if options.plot is not None:
        plot(options.plot, replays)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="CSV file")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--pool-tokens", type=int, default=Speed().pool_tokens, help="KV pool of the simulated worker")
    defaults = QueueSettings()
    parser.add_argument("--long-wait-s", type=float, default=defaults.long_wait_s, help="see QueueSettings")
    parser.add_argument("--claims-per-long-wait", type=int, default=defaults.claims_per_long_wait, help="the same")
    parser.add_argument("--plot", type=Path, help="picture of cumulative service by client; needs matplotlib")
    with redis_url(os.environ.get("TIDEGATE_REDIS_URL")) as found:
        asyncio.run(main(found, parser.parse_args()))
