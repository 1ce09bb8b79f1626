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
from worker.engine.modes import MODES
from worker.engine.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
PROMPT_TOKENS = 200
WAITING_PROMPT_TOKENS = 20


class NoExecutor:
    """Computes nothing: whatever time a step takes is the engine's."""

    def __init__(self, num_blocks: int) -> None:
        self.block_size = BLOCK_SIZE
        self.num_blocks = num_blocks
        self._token = SampledToken(7)

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """The same token for every row that samples."""
        return [self._token if row.samples else None for row in batch.rows]


def make_engine(num_blocks: int, max_num_seqs: int, long_after_steps: int, max_waiting: int) -> Engine:
    """An engine of the default mode over a pool of so many blocks, with an open session 1."""
    manager = CacheManager(BlockPool(num_blocks), BLOCK_SIZE, keyed_digest(b"bench"))
    config = SchedulerConfig(max_num_seqs, max(8192, max_num_seqs), 2048, long_after_steps=long_after_steps)
    limits = ModelLimits("none", 8192, VOCAB_SIZE, BLOCK_SIZE, num_blocks - 1, max_num_seqs)
    executor, scheduler = NoExecutor(num_blocks), Scheduler(manager, config, MODES["full"])
    engine = Engine(
        executor, scheduler, manager, limits, eos_token_ids=[0], now=time.perf_counter, max_waiting=max_waiting
    )
    engine.open_session(1)
    return engine


def submit(engine: Engine, first: int, count: int, num_prompt: int, max_tokens: int) -> None:
    """Requests number `first` and following, each with a prompt of its own."""
    sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    for index in range(first, first + count):
        engine.submit(1, f"r{index}", 1, [(index * 31 + each) % VOCAB_SIZE for each in range(num_prompt)], sampling)


def measure_decode(num_requests: int, num_blocks: int, num_steps: int, num_waiting: int) -> list[float]:
    """CPU seconds per step in which each of `num_requests` requests decodes a token, while others wait for a slot."""
    engine = make_engine(num_blocks, num_requests, 1 << 30, num_waiting)
    submit(engine, 0, num_requests, PROMPT_TOKENS, num_steps + 1000)
    while engine.step().stats.num_sampled < num_requests:
        pass
    submit(engine, num_requests, num_waiting, WAITING_PROMPT_TOKENS, 8)
    seconds = []
    for _ in range(num_steps):
        started = time.thread_time()
        stats = engine.step().stats
        seconds.append(time.thread_time() - started)
        if stats.num_sampled != num_requests:
            raise RuntimeError(f"{stats.num_sampled} of {num_requests} requests decoded")
    return seconds


def measure_churn(num_requests: int, num_blocks: int, num_steps: int, num_waiting: int) -> list[float]:
    """CPU seconds per step in which about one in 64 requests ends and another enters.

    A quarter of the slots is held by long requests, which yield to newcomers that find none.
    """
    engine = make_engine(num_blocks, num_requests, 32, num_waiting + num_requests + 64)
    submit(engine, 0, num_requests // 4, PROMPT_TOKENS, 4000)
    for length in range(1, 65):  # so that they end one after the other
        submit(engine, length * num_requests, max(1, num_requests // 64), WAITING_PROMPT_TOKENS, length)
    seconds: list[float] = []
    next_name = 10**6
    while len(seconds) < 64 + num_steps:
        missing = num_requests + num_waiting - engine.num_requests
        submit(engine, next_name, max(0, missing), WAITING_PROMPT_TOKENS, 64)
        next_name += max(0, missing)
        started = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - started)
    return seconds[64:]


def main() -> None:
    """Prints a table of step times over the number of running requests."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduler", description=__doc__)
    parser.add_argument("--blocks", type=int, default=65_536, help="KV blocks in the pool (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting requests (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps per measurement (default: %(default)s)")
    args = parser.parse_args()
    table = Table(
        title=f"CPU time of a step's schedule, update and blocks; {args.blocks} blocks of {BLOCK_SIZE} tokens"
    )
    for column in ("work", "running", "waiting", "median ms", "p99 ms", "µs per request"):
        table.add_column(column, justify="right")
    for name, measure in (("decode", measure_decode), ("churn", measure_churn)):
        for num_waiting in (0, args.waiting):
            for num_requests in (16, 64, 128, 256, 512, 1024):
                seconds = sorted(measure(num_requests, args.blocks, args.steps, num_waiting))
                median, p99 = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
                values = (f"{median * 1e3:.3f}", f"{p99 * 1e3:.3f}", f"{median / num_requests * 1e6:.2f}")
                table.add_row(name, str(num_requests), str(num_waiting), *values)
    Console().print(table)


if __name__ == "__main__":
    main()
