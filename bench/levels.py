"""What the scheduler's levels, budget and look-ahead do, beside the other modes: `python -m bench.levels`.

Runs in simulated time on a machine that takes as long for a step as the cost model says, so a minute of serving takes
seconds and every run is the same; with `--real` the mixed load runs on the default model, in real time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from rich.console import Console
from rich.table import Table

from bench.workload import Work, mixed
from common.types import ModelLimits, SamplingParams
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.batch import Batch, SampledToken
from worker.engine.cost_model import chunk_kv_tokens
from worker.engine.engine import Engine
from worker.engine.executor import Executor
from worker.engine.modes import MODES
from worker.engine.scheduler import Scheduler, SchedulerConfig

BLOCK_SIZE = 16
CONTEXT = 8192
VOCAB_SIZE = 49_152
FIRST_CHUNK_S = 0.1
STEP_S, TOKEN_S, KV_TOKEN_S, ROW_S = 0.017, 0.9e-3, 0.9e-6, 0.05e-3
"""Seconds per step, token, KV token and row: measured with the default model on two cores of a shared machine."""


class Machine(Protocol):
    """What computes, and the clock that goes with it."""

    executor: Executor

    def now(self) -> float:
        """Seconds that never go back."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Returns at that time, or at once if it is over."""
        ...


class SimulatedMachine:
    """Lets its clock go on by what a step costs, and computes nothing."""

    def __init__(self, num_blocks: int) -> None:
        self.block_size = BLOCK_SIZE
        self.num_blocks = num_blocks
        self.executor: Executor = self
        self._now_s = 0.0
        self._token = SampledToken(7)

    def now(self) -> float:
        """See Machine."""
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        """See Machine."""
        self._now_s = max(self._now_s, at_s)

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """See Executor."""
        num_kv_tokens = sum(chunk_kv_tokens(row.request.num_computed, row.num_new) for row in batch.rows)
        self._now_s += STEP_S + TOKEN_S * batch.num_tokens + KV_TOKEN_S * num_kv_tokens + ROW_S * len(batch.rows)
        return [self._token if row.samples else None for row in batch.rows]


class RealMachine:
    """A model on this machine, in real time."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def now(self) -> float:
        """See Machine."""
        return time.perf_counter()

    def wait_until(self, at_s: float) -> None:
        """See Machine."""
        time.sleep(max(0.0, at_s - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes, in seconds from the start."""

    at_s: float
    name: str
    work: Work


@dataclass(slots=True)
class Log:
    """What a run did."""

    token_at_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_chunk_waits_s: list[float] = field(default_factory=list)
    step_before_s: list[float] = field(default_factory=list)  # how long the step took that each of these waited for
    held_share: list[float] = field(default_factory=list)  # per step: tokens held / token slots in referenced blocks
    used_share: list[float] = field(default_factory=list)  # per step: referenced blocks / pool
    num_yielded: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_computed: int = 0
    seconds: float = 0.0


class Run:
    """One engine of one mode, which serves arrivals."""

    def __init__(self, machine: Machine, mode: str, **bounds: float) -> None:
        num_blocks = machine.executor.num_blocks
        policies = MODES[mode]
        self._machine = machine
        self._manager = CacheManager(
            BlockPool(num_blocks), BLOCK_SIZE, keyed_digest(b"bench"), prefix_cache=policies.prefix_cache
        )
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_chunk_tokens": 512} | bounds
        config = SchedulerConfig(first_chunk_s=FIRST_CHUNK_S, **sizes)  # type: ignore[arg-type]
        self._scheduler = Scheduler(self._manager, config, policies)
        limits = ModelLimits("bench", CONTEXT, VOCAB_SIZE, BLOCK_SIZE, num_blocks - 1, config.max_num_seqs)
        self._engine = Engine(
            machine.executor, self._scheduler, self._manager, limits, [], machine.now, max_waiting=10**6
        )
        self._engine.open_session(1)

    def serve(self, arrivals: Sequence[Arrival]) -> Log:
        """Until every request has ended."""
        pending = sorted(arrivals, key=lambda arrival: arrival.at_s, reverse=True)
        log, start_s, last_step_s = Log(), self._machine.now(), 0.0
        while pending or self._engine.num_requests:
            now_s = self._machine.now()
            while pending and start_s + pending[-1].at_s <= now_s:
                self._submit(pending.pop(), start_s)
            if not self._engine.num_requests:
                self._machine.wait_until(start_s + pending[-1].at_s)
                continue
            if self._engine.pause_s > 0:
                ends_s = now_s + self._engine.pause_s
                self._machine.wait_until(min(ends_s, start_s + pending[-1].at_s) if pending else ends_s)
                continue
            self._step(log, start_s, last_step_s)
            last_step_s = self._machine.now() - now_s
        log.seconds = self._machine.now() - start_s
        return log

    def _submit(self, arrival: Arrival, start_s: float) -> None:
        sampling = SamplingParams(seed=0, max_tokens=arrival.work.num_output, temperature=0.0, ignore_eos=True)
        arrived_s = start_s + arrival.at_s
        self._engine.submit(1, arrival.name, 1, arrival.work.prompt, sampling, arrived_s=arrived_s)

    def _step(self, log: Log, start_s: float, last_step_s: float) -> None:
        output = self._engine.step()
        stats, now_s = output.stats, self._machine.now() - start_s
        for news in output.sessions.values():
            for told in news.outputs:
                log.token_at_s[told.request_id].extend([now_s] * len(told.token_ids))
        log.first_chunk_waits_s += stats.first_chunk_waits_s
        log.step_before_s += [last_step_s] * len(stats.first_chunk_waits_s)
        log.num_yielded += stats.num_yielded
        log.num_preemptions += stats.num_preemptions
        log.num_recomputed += stats.num_recomputed_tokens
        log.num_computed += stats.num_tokens
        if stats.referenced_blocks:
            log.held_share.append(stats.num_held_tokens / stats.num_held_slots)
            log.used_share.append(stats.referenced_blocks / (self._manager.pool.num_usable))


def quantiles(values: Sequence[float], scale: float = 1000.0) -> list[str]:
    """Median, 90 %, 99 % and the most, scaled."""
    ordered = sorted(values)
    return [f"{scale * ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.0f}" for share in (0.5, 0.9, 0.99, 1)]


def poisson(work: Sequence[Work], rate: float, seed: int = 1) -> list[Arrival]:
    """Arrivals at random moments, `rate` per second on average."""
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for index, each in enumerate(work):
        at_s += rng.expovariate(rate)
        arrivals.append(Arrival(at_s, f"r{index}", each))
    return arrivals


def unlike(index: int, length: int) -> tuple[int, ...]:
    """A prompt that shares no block with another's."""
    rng = random.Random(index)
    return tuple(rng.randrange(100, 40_000) for _ in range(length))


def show_flood(make_machine: Callable[[int], Machine]) -> Table:
    """Sixteen requests of 2,000 tokens hold all slots when a flood of short ones begins."""
    table = Table(
        title="16 slots, 16 requests of 2,000 tokens, and short ones of 30 tokens from second 2 until all ended"
    )
    for column in (
        "short per s",
        "",
        "long / alone: mean",
        "most",
        "short: first chunk ms p50",
        "p90",
        "p99",
        "yields",
    ):
        table.add_column(column, justify="right")
    long = [Arrival(0.0, f"long{index}", Work(unlike(index, 50), 2000)) for index in range(16)]
    alone = Run(make_machine(4096), "full", max_num_seqs=16).serve(long).token_at_s
    seconds = 2 * alone["long0"][-1]
    for rate in (1, 2, 16):
        short = [
            Arrival(2 + index / rate, f"short{index}", Work(unlike(1000 + index, 40), 30))
            for index in range(int(seconds * rate))
        ]
        for name, mode in (("levels", "full"), ("first come, first served", "paged")):
            log = Run(make_machine(4096), mode, max_num_seqs=16).serve([*long, *short])
            ratios = [log.token_at_s[each.name][-1] / alone[each.name][-1] for each in long]
            waits = quantiles(log.first_chunk_waits_s[len(long) :])[:3]
            table.add_row(
                str(rate), name, f"{sum(ratios) / 16:.2f}", f"{max(ratios):.2f}", *waits, str(log.num_yielded)
            )
    return table


def show_lateness(
    make_machine: Callable[[int], Machine], num_requests: int, share: float, modes: Sequence[str]
) -> Table:
    """The mixed load at a share of what the default mode can do when everything waits already."""
    work = mixed(num_requests)
    busy = Run(make_machine(4096), "full").serve([Arrival(0.0, f"r{i}", each) for i, each in enumerate(work)])
    rate = share * num_requests / busy.seconds
    table = Table(
        title=f"First chunks under the mixed load, {num_requests} requests at {rate:.2f} per second, {share:.0%}"
    )
    columns = (
        "mode",
        "within 100 ms + a step",
        "wait ms p50",
        "p90",
        "p99",
        "most",
        "TTFT ms p50",
        "p99",
        "recomputed",
    )
    for column in columns:
        table.add_column(column, justify="right")
    arrivals = poisson(work, rate)
    for mode in modes:
        log = Run(make_machine(4096), mode).serve(arrivals)
        pairs = zip(log.first_chunk_waits_s, log.step_before_s, strict=True)
        in_time = sum(wait <= FIRST_CHUNK_S + step for wait, step in pairs) / len(arrivals)
        ttft = quantiles([log.token_at_s[each.name][0] - each.at_s for each in arrivals])
        recomputed = f"{log.num_recomputed / log.num_computed:.1%}"
        waits = quantiles(log.first_chunk_waits_s)
        table.add_row(mode, f"{in_time:.1%}", *waits, ttft[0], ttft[2], recomputed)
    return table


def show_gaps(make_machine: Callable[[int], Machine]) -> Table:
    """Eight requests decode while a prompt of 8,000 tokens is computed."""
    table = Table(title="Gaps between the tokens of 8 requests while a prompt of 8,000 tokens is computed")
    for column in ("mode", "gap ms p50", "p90", "p99", "most", "prompt takes s"):
        table.add_column(column, justify="right")
    chats = [Arrival(0.0, f"chat{index}", Work(unlike(index, 50), 1500)) for index in range(8)]
    for mode in ("full", "paged"):
        log = Run(make_machine(4096), mode).serve([*chats, Arrival(5.0, "huge", Work(unlike(99, 8000), 2))])
        until_s = log.token_at_s["huge"][0]
        gaps = []
        for chat in chats:
            times = [at_s for at_s in log.token_at_s[chat.name] if 5.0 <= at_s <= until_s]
            gaps += [after - before for before, after in pairwise(times)]
        table.add_row(mode, *quantiles(gaps), f"{until_s - 5:.1f}")
    return table


def show_memory(make_machine: Callable[[int], Machine]) -> Table:
    """The mixed load, all at once, in a pool that holds less than the slots could take."""
    table = Table(title="Memory under the mixed load, all 200 requests at once, 1,000 blocks of 16 tokens, 64 slots")
    for column in (
        "mode",
        "tokens / slots in used blocks",
        "used blocks / pool",
        "seconds",
        "recomputed",
        "preemptions",
    ):
        table.add_column(column, justify="right")
    arrivals = [Arrival(0.0, f"r{index}", work) for index, work in enumerate(mixed(200))]
    for mode in ("static", "continuous", "paged", "full"):
        log = Run(make_machine(1001), mode).serve(arrivals)
        held, used = (sum(shares) / len(shares) for shares in (log.held_share, log.used_share))
        recomputed = f"{log.num_recomputed / log.num_computed:.1%}"
        table.add_row(mode, f"{held:.1%}", f"{used:.1%}", f"{log.seconds:.0f}", recomputed, str(log.num_preemptions))
    return table


def real_machine() -> Callable[[int], Machine]:
    """The default model on this machine; every run uses the same blocks again."""
    import torch

    from bench.in_process import EngineOptions, build_runner
    from common.default_model import ensure_default_model
    from worker.model.weights import load_model

    options = EngineOptions(dtype=torch.bfloat16, num_blocks=4096)
    torch.set_num_threads(options.num_threads)
    runner = build_runner(load_model(ensure_default_model(on_progress=print), options.dtype), options)
    runner.warm_up()
    machine = RealMachine(runner)
    return lambda num_blocks: machine


def main() -> None:
    """Prints a table for each question."""
    parser = argparse.ArgumentParser(prog="python -m bench.levels", description=__doc__)
    parser.add_argument("--real", action="store_true", help="the mixed load only, on the default model in real time")
    parser.add_argument("--requests", type=int, default=400, help="requests of the mixed load (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity (default: %(default)s)")
    args = parser.parse_args()
    console = Console(width=160)
    if args.real:
        console.print(show_lateness(real_machine(), args.requests, args.load, ["full", "paged"]))
        return
    console.print(show_flood(SimulatedMachine))
    console.print(show_lateness(SimulatedMachine, args.requests, args.load, list(MODES)))
    console.print(show_gaps(SimulatedMachine))
    console.print(show_memory(SimulatedMachine))


if __name__ == "__main__":
    main()
