"""Replays a trace whose prompts begin alike on simulated workers with real prefix caches, placed by the real queue.

The trace is a .jsonl or .csv file that names the blocks of 512 tokens its prompts begin with (`hash_ids`). Time is
the simulation's own, also for the queue's scripts. One token of the workers' block managers stands for a named
block. Three ways of placing are compared: round robin (as many gateways as workers, each of which reaches one of
them, take the requests in turn), by load alone (`prefix_weight` 0), and by load and cached prefix. hits: part of
the prompt tokens that was found cached; computed: millions of prompt tokens that were not; max/mean: of the
workers' computed tokens, prompt and output.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean, quantiles

from bench.traces import BLOCK_TOKENS, TraceRow, load_trace
from common.local_redis import redis_url
from common.types import Band, BlockUsage, ClaimRef, ModelLimits, SamplingParams
from gateway.placement.scoring import MAX_BLOCKS, Belief, CachedPrefixes, Prefix
from gateway.queueing.queue import Claim, QueueEntry, WorkerReport
from gateway.store.connection import connect, read_script
from gateway.store.redis_queue import QueueSettings, RedisQueue
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.request import Request

MODEL = "m"
HOUR_S = 3600.0
REAL_BLOCK_TOKENS = 16  # of a worker's KV block: the gateway names so many blocks of a prompt at most
_CLOCK = "local function read_clock() return tonumber(redis.call('GET', ARGV[1] .. 'clock')) end\n"


@dataclass(frozen=True)
class Speed:
    """A worker: seconds of a step are linear in the prompt tokens that it computes and in the requests that decode."""

    step_s: float = 0.015
    request_s: float = 0.0002
    prompt_token_s: float = 0.00003
    chunk_tokens: int = 4096
    max_num_seqs: int = 64
    pool_blocks: int = 16_000  # of 512 tokens: these conversations return late, so little memory finds little


@dataclass(eq=False)
class Job:
    """One request of the trace, and what became of it."""

    row: TraceRow
    request: Request
    owner: str
    arrival_s: float
    belief: Belief | None = None
    tokens_found: int = 0
    tokens_left: int = 0  # of the prompt, to be computed
    num_made: int = 0
    first_token_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def blocks_needed(self) -> int:
        return len(self.row.blocks) - -self.row.num_output // BLOCK_TOKENS + 1


@dataclass
class Worker:
    """A real block manager; computing takes simulated time."""

    worker_id: str
    speed: Speed
    seq: int = 0
    num_computed: int = 0  # tokens
    step_end_s: float | None = None
    running: list[Job] = field(default_factory=list)
    unaccounted: list[Claim] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = CacheManager(BlockPool(self.speed.pool_blocks + 1), 1, keyed_digest(b""))

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(MODEL, 1 << 20, 1 << 31, 1, self.speed.pool_blocks, self.speed.max_num_seqs)

    def report(self, gateway: str) -> WorkerReport:
        self.seq += 1
        counts, num_running = self.manager.counts, len(self.running)
        mine = [claim for claim in self.unaccounted if claim.owner == gateway]
        self.unaccounted = [claim for claim in self.unaccounted if claim.owner != gateway]
        usage = BlockUsage(
            seq=self.seq,
            empty=counts.empty,
            cached=counts.cached,
            referenced=counts.referenced,
            swapping=0,
            running=num_running,
            waiting=0,
            free_slots=self.speed.max_num_seqs - num_running,
            accounted=tuple(ClaimRef(claim.request_id, claim.attempt) for claim in mine),
        )
        return WorkerReport(self.worker_id, 1, self.limits, usage)

    def take(self, claim: Claim, job: Job) -> None:
        num_to_come = max(0, job.blocks_needed - job.request.num_tokens)  # a block is a token here
        if not self.manager.admit(job.request, headroom=num_to_come):
            raise RuntimeError(f"{self.worker_id} was promised more than it has: {job.request}")
        self.manager.cover(job.request, job.request.num_tokens)
        for _ in range(num_to_come):
            self.manager.grow(job.request)
        job.tokens_found = min(job.request.num_computed * BLOCK_TOKENS, job.row.num_prompt)
        job.tokens_left = max(job.row.num_prompt - job.tokens_found, 1)
        self.running.append(job)
        self.unaccounted.append(claim)

    def begin_step(self, now_s: float) -> None:
        """Computes chunks by arrival and a token for everybody else; `step_end_s` says when that is done."""
        room, num_decodes = self.speed.chunk_tokens, 0
        for job in self.running:
            if not job.tokens_left:
                num_decodes += 1
                job.num_made += 1
            elif room:
                given = min(room, job.tokens_left)
                room -= given
                job.tokens_left -= given
                job.num_made = 0 if job.tokens_left else 1
        num_prompt_tokens = self.speed.chunk_tokens - room
        speed = self.speed
        taken_s = speed.step_s + speed.request_s * num_decodes + speed.prompt_token_s * num_prompt_tokens
        self.num_computed += num_decodes + num_prompt_tokens
        self.step_end_s = now_s + taken_s

    def end_step(self, now_s: float) -> tuple[list[Job], list[Job]]:
        """The requests that have their first token, and those that have their last."""
        first = [job for job in self.running if job.num_made and not job.first_token_s]
        for job in first:
            job.first_token_s = now_s
            job.request.num_computed = len(job.request.token_ids)
            self.manager.publish(job.request)
        ended = [job for job in self.running if job.num_made >= job.row.num_output]
        for job in ended:
            self.manager.free(job.request)
        self.running = [job for job in self.running if job.num_made < job.row.num_output]
        self.step_end_s = None
        return first, ended


class Replay:
    """One pass through the trace, placed one way."""

    def __init__(self, url: str, rows: Sequence[TraceRow], speed: Speed, *, num_workers: int, way: str) -> None:
        pool = f"bench-{secrets.token_hex(4)}"
        self._clock_key = f"tidegate:{{{pool}}}:clock"
        self._clock = connect(url, max_connections=1, timeout_s=5.0)
        self.workers = {f"w{n}": Worker(f"w{n}", speed) for n in range(num_workers)}
        owners = [f"g{n}" for n in range(num_workers if way == "round robin" else 1)]
        weight = 0.0 if way == "load" else QueueSettings().prefix_weight
        settings = QueueSettings(claim_lease_s=HOUR_S, report_ttl_s=HOUR_S, prefix_weight=weight)
        self._queues = {
            owner: RedisQueue(url, pool=pool, gateway_id=owner, settings=settings, read_script=_read_script)
            for owner in owners
        }
        self._prefixes = CachedPrefixes()
        for worker in self.workers.values():
            self._prefixes.add(worker.worker_id, 1, worker.limits)
        names = count(1 << 24)  # of what a prompt ends with: nobody shares it
        self.jobs = [
            Job(row, _request(number, row, next(names)), owners[number % len(owners)], row.arrival_s or 0.0)
            for number, row in enumerate(rows)
        ]
        self._by_id = {job.request_id: job for job in self.jobs}

    async def run(self) -> None:
        """Fills in the jobs' times."""
        await self._set_clock(0.0)
        for number, (owner, queue) in enumerate(self._queues.items()):
            await queue.heartbeat(ttl_s=1e6)
            if len(self._queues) > 1:
                await queue.reach([f"w{number}"], ttl_s=1e6)
            await queue.dispatch([worker.report(owner) for worker in self.workers.values()])
        coming, num_left = self.jobs[::-1], len(self.jobs)
        while num_left:
            ends = [worker.step_end_s for worker in self.workers.values() if worker.step_end_s is not None]
            now_s = min([*ends, *(job.arrival_s for job in coming[-1:])])
            arrived = []
            while coming and coming[-1].arrival_s <= now_s:
                arrived.append(coming.pop())
            changed = [it for it in self.workers.values() if it.step_end_s is not None and it.step_end_s <= now_s]
            ended = [job for worker in changed for job in self._end_step(worker, now_s)]
            if arrived or ended:
                await self._turn(now_s, arrived, ended)
            num_left -= len(ended)
            for worker in self.workers.values():
                if worker.step_end_s is None and worker.running:
                    worker.begin_step(now_s)
        for queue in self._queues.values():
            await queue.close()
        await self._clock.delete(self._clock_key)
        await self._clock.aclose()

    def _end_step(self, worker: Worker, now_s: float) -> list[Job]:
        first, ended = worker.end_step(now_s)
        for job in first:
            if job.belief is not None:
                self._prefixes.correct(job.belief, job.tokens_found // BLOCK_TOKENS)
        return ended

    async def _turn(self, now_s: float, arrived: Sequence[Job], ended: Sequence[Job]) -> None:
        """What gateways do between steps."""
        await self._set_clock(now_s)
        for job in ended:
            await self._queues[job.owner].finish(job.request_id)
        for job in arrived:
            await self._queues[job.owner].enqueue(self._entry(job), max_length=10**6)
        for owner, queue in self._queues.items():
            reports = [worker.report(owner) for worker in self.workers.values()]
            for claim in await queue.dispatch(reports):
                job = self._by_id[claim.request_id]
                self.workers[claim.worker_id].take(claim, job)
                job.belief = self._prefixes.note(claim.worker_id, 1, _prefix(job))

    def _entry(self, job: Job) -> QueueEntry:
        num_blocks, believed = len(job.row.blocks), self._prefixes.believed(_prefix(job), self.workers)
        return QueueEntry(
            job.request_id,
            job.owner,
            MODEL,
            "bench",
            Band.NORMAL,
            num_input_tokens=num_blocks,
            num_tokens_needed=job.blocks_needed,
            cached_blocks=believed,
        )

    async def _set_clock(self, now_s: float) -> None:
        await self._clock.set(self._clock_key, round((1e9 + now_s) * 1e6))


def _prefix(job: Job) -> Prefix:
    """As far as a gateway looks."""
    return Prefix(job.request.token_ids[: MAX_BLOCKS * REAL_BLOCK_TOKENS // BLOCK_TOKENS + 1], "")


def _request(number: int, row: TraceRow, last: int) -> Request:
    token_ids = [*row.blocks, last]
    sampling = SamplingParams(seed=0, max_tokens=row.num_output)
    return Request(f"bench/{number}", 1, 1, token_ids, len(token_ids), sampling, Band.NORMAL, "", number)


def _read_script(name: str) -> str:
    return _CLOCK if name == "clock" else read_script(name)


def summary(way: str, replay: Replay) -> str:
    """One row of the table."""
    jobs, work = replay.jobs, [worker.num_computed for worker in replay.workers.values()]
    found, asked = sum(job.tokens_found for job in jobs), sum(job.row.num_prompt for job in jobs)
    ttft = [job.first_token_s - job.arrival_s for job in jobs]
    cuts = quantiles(ttft, n=100)
    numbers = (100 * found / asked, (asked - found) / 1e6, max(work) / mean(work), mean(ttft), cuts[49], cuts[98])
    return f"{way:<16}" + "".join(f"{number:>11.2f}" for number in numbers)


async def main(url: str, options: argparse.Namespace) -> None:
    """Replays the trace in every way and prints the table."""
    trace = load_trace(options.trace, end_row=options.requests)
    if not trace.has_arrivals or not any(row.blocks for row in trace.rows):
        raise SystemExit(f"{options.trace}: its rows must have arrivals and hash_ids")
    speed = Speed(pool_blocks=options.pool_blocks)
    rows = [row for row in trace.rows if 0 < len(row.blocks) - -row.num_output // BLOCK_TOKENS < speed.pool_blocks]
    print(f"{len(rows)} requests, {options.workers} workers, {speed}")
    heads = ("hits %", "computed", "max/mean", "mean TTFT", "p50 TTFT", "p99 TTFT")
    print(f"{'':<16}" + "".join(f"{head:>11}" for head in heads))
    for way in ("round robin", "load", "load and prefix"):
        replay = Replay(url, rows, speed, num_workers=options.workers, way=way)
        await replay.run()
        print(summary(way, replay), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help=".jsonl or .csv file with hash_ids")
    parser.add_argument("--requests", type=int, default=3000, help="only the first so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pool-blocks", type=int, default=Speed().pool_blocks, help="KV pool, in blocks of 512 tokens")
    with redis_url(os.environ.get("TIDEGATE_REDIS_URL")) as found:
        asyncio.run(main(found, parser.parse_args()))
