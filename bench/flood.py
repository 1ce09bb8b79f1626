"""How long a tenant of the high band waits for first tokens while the low band floods the queue, on a simulated worker.

Sizes are drawn from a trace as `bench.fairness` takes it. The tenant's requests come at random; the flood is there from
the start and should outlast them. The worker never takes a running request back: what helps is what the queue keeps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from bench.fairness import HOUR_S, Replay, Request, Speed, read_trace
from common.local_redis import redis_url
from common.types import Band
from gateway.queueing.queue import QueueEntry
from gateway.store.redis_queue import QueueSettings

PAID = "paid"


class FloodReplay(Replay):
    """One tenant in the high band, the others in the low one."""

    def _entry(self, request: Request) -> QueueEntry:
        return replace(super()._entry(request), band=Band.HIGH if request.client == PAID else Band.LOW)


def make_paid(trace: Sequence[Request], num_requests: int, per_s: float, dice: Random) -> list[Request]:
    """Requests at random moments, with sizes from the trace."""
    now_s = 0.0
    requests = []
    for i in range(num_requests):
        now_s += dice.expovariate(per_s)
        size = dice.choice(trace)
        requests.append(Request(f"paid/{i}", PAID, now_s, size.prompt_tokens, size.output_tokens))
    return requests


def quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


async def main(url: str, options: argparse.Namespace) -> None:
    """Prints TTFT of the high band alone, and under the flood with growing headroom."""
    print(f"{'':<24}{'TTFT p50':>10}{'p90':>10}{'p99':>10}{'tokens/s':>10}")
    for headroom in (None, *options.headroom):
        trace = read_trace(options.trace, None)
        paid = make_paid(trace, options.requests, options.per_s, Random(options.seed))
        flood = [] if headroom is None else [replace(request, client="batch", arrival_s=0.0) for request in trace]
        settings = QueueSettings(claim_lease_s=HOUR_S, report_ttl_s=HOUR_S, low_headroom=headroom or 0.0)
        await FloodReplay(url, Speed(), is_fair=True, settings=settings).run([*paid, *flood])
        ordered = sorted(request.first_token_s - request.arrival_s for request in paid)
        everything = [*paid, *flood]
        tokens = sum(request.prompt_tokens + request.output_tokens for request in everything)
        per_s = tokens / max(request.end_s for request in everything)
        name = "alone" if headroom is None else f"flood, headroom {headroom:g}"
        times = "".join(f"{quantile(ordered, part):>10.3f}" for part in (0.5, 0.9, 0.99))
        print(f"{name:<24}{times}{per_s:>10.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="CSV file")
    parser.add_argument("--requests", type=int, default=120, help="of the high band")
    parser.add_argument("--per-s", type=float, default=0.2, help="their mean rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--headroom", type=float, nargs="*", default=[0.0, 0.1, 0.2], help="parts of the worker")
    with redis_url(os.environ.get("TIDEGATE_REDIS_URL")) as found:
        asyncio.run(main(found, parser.parse_args()))
