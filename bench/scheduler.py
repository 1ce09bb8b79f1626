"""How long the engine takes around a step, without a model: `python -m bench.scheduler`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from common.types import ModelLimits, SamplingParams
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.batch import Batch, SampledToken
from worker.engine.engine import Engine
from worker.engine.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
PROMPT_TOKENS = 200


class NoExecutor:
    """Computes nothing: whatever time a step takes is the engine's."""

    def __init__(self, num_blocks: int) -> None:
        self.block_size = BLOCK_SIZE
        self.num_blocks = num_blocks
        self._token = SampledToken(7)

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """The same token for every row that samples."""
        return [self._token if row.samples else None for row in batch.rows]


def make_engine(num_blocks: int, max_num_seqs: int) -> Engine:
    """An engine over a pool of so many blocks, with an open session 1."""
    manager = CacheManager(BlockPool(num_blocks), BLOCK_SIZE, keyed_digest(b"bench"))
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs, max(8192, max_num_seqs), 2048))
    limits = ModelLimits("none", 8192, VOCAB_SIZE, BLOCK_SIZE, num_blocks - 1, max_num_seqs)
    engine = Engine(NoExecutor(num_blocks), scheduler, manager, limits, eos_token_ids=[0])
    engine.open_session(1)
    return engine


def measure_decode(num_requests: int, num_blocks: int, num_steps: int) -> list[float]:
    """CPU seconds per step in which each of `num_requests` requests decodes one token."""
    engine = make_engine(num_blocks, num_requests)
    sampling = SamplingParams(seed=1, max_tokens=num_steps + 1000)
    for index in range(num_requests):
        prompt = [(index * 31 + position) % VOCAB_SIZE for position in range(PROMPT_TOKENS)]
        engine.submit(1, f"r{index}", 1, prompt, sampling)
    running = 0
    while running < num_requests:
        running = engine.step().stats.num_sampled
    seconds = []
    for _ in range(num_steps):
        started = time.thread_time()
        stats = engine.step().stats
        seconds.append(time.thread_time() - started)
        if stats.num_sampled != num_requests:
            raise RuntimeError(f"{stats.num_sampled} of {num_requests} requests decoded")
    return seconds


def main() -> None:
    """Prints a table of step times over the number of running requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=65_536, help="KV blocks in the pool (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps per measurement (default: %(default)s)")
    args = parser.parse_args()
    table = Table(title=f"CPU time of a decode step, {args.blocks} blocks of {BLOCK_SIZE} tokens")
    for column in ("running", "median ms", "p99 ms", "µs per request"):
        table.add_column(column, justify="right")
    for num_requests in (16, 64, 128, 256, 512, 1024):
        seconds = sorted(measure_decode(num_requests, args.blocks, args.steps))
        median, p99 = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
        table.add_row(
            str(num_requests), f"{median * 1e3:.3f}", f"{p99 * 1e3:.3f}", f"{median / num_requests * 1e6:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
