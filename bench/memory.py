"""How well the KV cache is used, and what it costs: `python -m bench.memory`.

Shows how many of the token slots in referenced blocks hold the keys and values of a token, in every mode and for block
sizes from 2 to 64, and what the prefix cache costs when nobody finds anything in it. That runs in simulated time, as
the default model would take it; `--real` measures the last two on the model itself.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.in_process import EngineOptions, build_engine, build_runner
from bench.levels import KV_TOKEN_S, ROW_S, STEP_S, TOKEN_S
from bench.workload import Work, mixed
from common.default_model import ensure_default_model
from common.types import ModelLimits, SamplingParams
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.batch import Batch, SampledToken
from worker.engine.cost_model import chunk_kv_tokens
from worker.engine.engine import Engine
from worker.engine.executor import Executor
from worker.engine.modes import DEFAULT_MODE, MODES, Mode
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.model.weights import load_model

SESSION = 1
VOCAB_SIZE = 49_152
POOL_TOKENS = 32_768
AMPLE_TOKENS = 1 << 20
"""So many that nobody is preempted, and nobody comes back to find its own blocks."""

MAX_NUM_SEQS = 16
BLOCK_SIZE = 16
BLOCK_SIZES = (2, 4, 8, 16, 32, 64)
KERNEL_BLOCK_SIZES = (8, 16, 32, 64)
"""Of these, what the kernels serve: they read keys and values of 8 tokens at a time."""


class SimulatedExecutor:
    """Lets its clock go on by what a step takes on the default model, and computes nothing."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.now_s = 0.0
        self._token = SampledToken(7)

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """See Executor."""
        num_kv_tokens = sum(chunk_kv_tokens(row.request.num_computed, row.num_new) for row in batch.rows)
        self.now_s += STEP_S + TOKEN_S * batch.num_tokens + KV_TOKEN_S * num_kv_tokens + ROW_S * len(batch.rows)
        return [self._token if row.samples else None for row in batch.rows]


@dataclass(slots=True)
class Usage:
    """What one run did, summed over its steps."""

    held_tokens: int = 0  # whose keys and values are in referenced blocks
    slots: int = 0  # for tokens in referenced blocks
    num_steps: int = 0
    num_tokens: int = 0  # that passed through the model
    num_hits: int = 0
    engine_s: float = 0.0  # CPU time of everything but execution
    total_s: float = 0.0  # simulated

    @property
    def utilization(self) -> float:
        """Tokens held per slot."""
        return self.held_tokens / self.slots


def run(
    work: Iterable[Work],
    mode: Mode = MODES[DEFAULT_MODE],
    block_size: int = BLOCK_SIZE,
    *,
    pool_tokens: int = POOL_TOKENS,
) -> Usage:
    """Serves work as slots come free, in simulated time."""
    executor = SimulatedExecutor(pool_tokens // block_size + 1, block_size)
    manager = CacheManager(
        BlockPool(executor.num_blocks),
        block_size,
        keyed_digest(b"bench"),
        prefix_cache=mode.prefix_cache,
    )
    scheduler = Scheduler(manager, SchedulerConfig(MAX_NUM_SEQS, 512, 512), mode)
    limits = ModelLimits("bench", 8192, VOCAB_SIZE, block_size, manager.pool.num_usable, MAX_NUM_SEQS)
    engine = Engine(executor, scheduler, manager, limits, [], lambda: executor.now_s)
    engine.open_session(SESSION)
    waiting, usage = deque(enumerate(work)), Usage()
    while waiting or engine.num_requests:
        while waiting and engine.num_requests < MAX_NUM_SEQS + 8:
            index, request = waiting.popleft()
            sampling = SamplingParams(seed=0, max_tokens=request.num_output)
            engine.submit(SESSION, f"r{index}", 1, request.prompt, sampling)
        executor.now_s += engine.pause_s  # a batch that gathers
        before = time.thread_time()
        stats = engine.step().stats
        usage.engine_s += time.thread_time() - before
        usage.num_steps += 1
        usage.num_tokens += stats.num_tokens
        usage.num_hits += stats.num_hit_tokens
        usage.slots += stats.num_held_slots
        usage.held_tokens += stats.num_held_tokens
    usage.total_s = executor.now_s
    return usage


def show_modes(work: Sequence[Work]) -> Table:
    """Whose the slots are, by mode."""
    table = Table(
        title=f"Token slots of referenced blocks, mixed load, blocks of {BLOCK_SIZE}, {MAX_NUM_SEQS} at a time"
    )
    for column in ("mode", "hold a token", "seconds"):
        table.add_column(column, justify="right")
    for name, mode in MODES.items():
        usage = run(work, mode)
        table.add_row(name, f"{usage.utilization:.1%}", f"{usage.total_s:.0f}")
    return table


def show_prefix_cost(work: Sequence[Work], repeats: int) -> Table:
    """What the prefix cache costs when nothing is found: the engine's CPU time with it and without, in turns.

    Nobody is preempted in this mode and pool, so that nobody returns to find what it computed itself.
    """
    on, off = [], []
    for _ in range(repeats):
        off.append(run(work, MODES["paged"], pool_tokens=AMPLE_TOKENS))
        on.append(run(work, replace(MODES["paged"], prefix_cache=True), pool_tokens=AMPLE_TOKENS))
    assert all(usage.num_hits == 0 for usage in on), "the prompts of the load are not all different"
    table = Table(title=f"Prefix cache without a hit, {on[0].num_tokens} tokens, best of {repeats}")
    for column in ("prefix cache", "engine µs per token", "steps take", "of them for the cache"):
        table.add_column(column, justify="right")
    best_off, best_on = min(usage.engine_s for usage in off), min(usage.engine_s for usage in on)
    for name, engine_s, usage in (("off", best_off, off[0]), ("on", best_on, on[0])):
        share = (engine_s - best_off) / (usage.total_s + best_off)
        table.add_row(name, f"{1e6 * engine_s / usage.num_tokens:.2f}", f"{usage.total_s:.1f} s", f"{share:.2%}")
    return table


def show_sizes(work: Sequence[Work]) -> Table:
    """Utilization and the engine's time by block size."""
    table = Table(title="Block sizes; kernels serve multiples of 8")
    for column in ("tokens per block", "slots that hold a token", "engine µs per step", "served"):
        table.add_column(column, justify="right")
    for block_size in BLOCK_SIZES:
        usage = run(work, block_size=block_size)
        served = "yes" if block_size in KERNEL_BLOCK_SIZES else "no"
        engine_us = 1e6 * usage.engine_s / usage.num_steps
        table.add_row(str(block_size), f"{usage.utilization:.1%}", f"{engine_us:.0f}", served)
    return table


class TimedExecutor:
    """Passes steps on, and counts this thread's CPU time in them."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.block_size = inner.block_size
        self.num_blocks = inner.num_blocks
        self.thread_s = 0.0

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """See Executor."""
        started_s = time.thread_time()
        sampled = self._inner.execute(batch)
        self.thread_s += time.thread_time() - started_s
        return sampled


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run on the model took, in seconds."""

    wall_s: float
    cpu_s: float  # of all threads
    engine_s: float  # of them, this thread's outside of execution: schedule, blocks, hashes, update


def measure_real(work: Sequence[Work], repeats: int, block_sizes: Sequence[int] = KERNEL_BLOCK_SIZES) -> Table:
    """Tokens per second of the default model: block sizes, and the prefix cache on and off, in turns.

    Pairs of runs, in changing order, are compared: by wall time, which other processes disturb, by CPU time, and by
    what the engine alone took more of it, which is the cache's own cost.
    """
    threads = torch.get_num_threads()
    model = load_model(ensure_default_model(), torch.bfloat16)
    num_tokens = sum(len(request.prompt) + request.num_output for request in work)
    table = Table(
        title=f"Default model, {threads} threads, {num_tokens} tokens, prefix cache without a hit: {repeats} pairs"
    )
    for column in ("tokens per block", "tokens/s off", "on", "on / off: wall time", "CPU time", "the cache's own time"):
        table.add_column(column, justify="right")
    for block_size in block_sizes:
        options = EngineOptions(dtype=torch.bfloat16, block_size=block_size, num_threads=threads)
        runner = build_runner(model, options)
        runner.warm_up()
        costs: dict[bool, list[Cost]] = {False: [], True: []}
        for repeat in range(repeats):
            for is_on in (False, True) if repeat % 2 else (True, False):
                executor = TimedExecutor(runner)
                engine, _ = build_engine(model, executor, replace(options, prefix_cache=is_on))
                costs[is_on].append(serve(engine, executor, work))
        runner.close()
        pairs = list(zip(costs[True], costs[False], strict=True))
        table.add_row(
            str(block_size),
            *(f"{num_tokens / median(cost.wall_s for cost in costs[is_on]):.1f}" for is_on in (False, True)),
            f"{median(on.wall_s / off.wall_s for on, off in pairs):.3f}",
            f"{median(on.cpu_s / off.cpu_s for on, off in pairs):.3f}",
            f"{median((on.engine_s - off.engine_s) / off.cpu_s for on, off in pairs):+.2%}",
        )
    return table


def serve(engine: Engine, executor: TimedExecutor, work: Sequence[Work]) -> Cost:
    """Serves all at once."""
    for index, request in enumerate(work):
        sampling = SamplingParams(seed=0, max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
        engine.submit(SESSION, f"r{index}", 1, request.prompt, sampling)
    wall_s, cpu_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
    num_hits = 0
    while engine.num_requests:
        num_hits += engine.step().stats.num_hit_tokens
    assert not num_hits, "the prompts of the load are not all different"
    thread_s = time.thread_time() - thread_s
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s, thread_s - executor.thread_s)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=128, help="of the mixed load (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind that are compared")
    parser.add_argument("--real", action="store_true", help="measure the default model as well; takes minutes")
    parser.add_argument("--real-requests", type=int, default=16, help="of the load on the model (default: %(default)s)")
    parser.add_argument(
        "--real-sizes", type=int, nargs="+", default=KERNEL_BLOCK_SIZES, choices=KERNEL_BLOCK_SIZES, help="of blocks"
    )
    args = parser.parse_args()
    console, work = Console(), mixed(args.requests)
    console.print(show_modes(work))
    console.print(show_sizes(work))
    console.print(show_prefix_cost(work, args.repeats))
    if args.real:
        console.print(measure_real(mixed(args.real_requests, seed=1, scale=0.3), args.repeats, args.real_sizes))


if __name__ == "__main__":
    main()
