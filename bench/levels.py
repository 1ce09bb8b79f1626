"""What the scheduler's levels, budget and look-ahead do, beside the other modes: `python -m bench.levels`.

Runs in simulated time on a machine that takes as long for a step as the cost model says, so a minute of serving takes
seconds and every run is the same. With `--real` the default model serves in real time, for three minutes at most on a
quiet machine: first chunks under the mixed load, and gaps while a prompt of 8,000 tokens is computed; with
`--real-long` long requests in a flood of short ones.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
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
    unstarted_waits_s: list[float] = field(default_factory=list)  # at the end, of those without a first chunk
    step_s: list[float] = field(default_factory=list)
    step_end_s: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    held_share: list[float] = field(default_factory=list)  # per step: tokens held / token slots in referenced blocks
    used_share: list[float] = field(default_factory=list)  # per step: referenced blocks / pool
    num_yielded: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_computed: int = 0
    seconds: float = 0.0

    @property
    def waits_s(self) -> list[float]:
        """For the first chunk; of those that were not served, the time until the end."""
        return self.first_chunk_waits_s + self.unstarted_waits_s

    @property
    def share_in_time(self) -> float:
        """Of the first chunks, those within their time plus the step that was running."""
        steps_s = self.step_before_s + [0.0] * len(self.unstarted_waits_s)
        in_time = [wait <= FIRST_CHUNK_S + step for wait, step in zip(self.waits_s, steps_s, strict=True)]
        return sum(in_time) / len(in_time)

    def gaps_s(self, names: Sequence[str], from_s: float = 0.0, until_s: float = inf) -> list[float]:
        """Between the tokens of these requests, in a stretch of time."""
        gaps = []
        for name in names:
            times = [at_s for at_s in self.token_at_s[name] if from_s <= at_s <= until_s]
            gaps += [after - before for before, after in pairwise(times)]
        return gaps


class Run:
    """One engine of one mode, which serves arrivals."""

    def __init__(self, machine: Machine, mode: str, **bounds: float) -> None:
        num_blocks = machine.executor.num_blocks
        policies = MODES[mode]
        self._machine = machine
        self._manager = CacheManager(
            BlockPool(num_blocks), BLOCK_SIZE, keyed_digest(b"bench"), prefix_cache=policies.prefix_cache
        )
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_chunk_tokens": 512}
        config = SchedulerConfig(**({"first_chunk_s": FIRST_CHUNK_S} | sizes | bounds))  # type: ignore[arg-type]
        self._scheduler = Scheduler(self._manager, config, policies)
        limits = ModelLimits("bench", CONTEXT, VOCAB_SIZE, BLOCK_SIZE, num_blocks - 1, config.max_num_seqs)
        self._engine = Engine(
            machine.executor, self._scheduler, self._manager, limits, [], machine.now, max_waiting=10**6
        )
        self._engine.open_session(1)

    def serve(
        self,
        arrivals: Sequence[Arrival],
        *,
        is_over: Callable[[Log, float], bool] = lambda log, at_s: False,
        in_flight: int | None = None,
    ) -> Log:
        """Until every request has ended, or `is_over` (told the seconds since the start) says so.

        With `in_flight` requests come whenever there are fewer than that.
        """
        pending = sorted(arrivals, key=lambda arrival: arrival.at_s, reverse=True)
        log, start_s, last_step_s = Log(), self._machine.now(), 0.0
        while pending or self._engine.num_requests:
            now_s = self._machine.now()
            if is_over(log, now_s - start_s):
                break
            if in_flight is not None:
                while pending and self._engine.num_requests < in_flight:
                    self._submit(pending.pop(), now_s)
            else:
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
            log.step_s.append(last_step_s)
            log.step_end_s.append(self._machine.now() - start_s)
        ended_s = self._machine.now()
        log.seconds = ended_s - start_s
        left = [*self._scheduler.waiting, *self._scheduler.running]
        log.unstarted_waits_s = [ended_s - request.arrived_s for request in left if request.started_s is None]
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
        log.step_tokens.append(stats.num_tokens)
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


def show_flood(
    make_machine: Callable[[int], Machine],
    num_slots: int = 16,
    num_output: int = 2000,
    rates: Sequence[float] = (1, 2, 16),
) -> Table:
    """Long requests hold all slots when a flood of short ones begins, which ends when the long ones have ended."""
    table = Table(
        title=f"{num_slots} slots, as many requests of {num_output:,} tokens, and short ones of 30 tokens from second 2"
        " until all the long ones ended; alone these run without the short ones"
    )
    for column in (
        "short per s",
        "",
        "long / alone: mean",
        "most",
        "short ended",
        "short: first chunk ms p50",
        "p90",
        "p99",
        "yields",
    ):
        table.add_column(column, justify="right")
    long = [Arrival(0.0, f"long{index}", Work(unlike(index, 50), num_output)) for index in range(num_slots)]

    def have_ended(log: Log, at_s: float) -> bool:
        return all(len(log.token_at_s[each.name]) == num_output for each in long)

    alone = Run(make_machine(4096), "full", max_num_seqs=num_slots).serve(long).token_at_s
    seconds = 4 * max(times[-1] for times in alone.values())
    for rate in rates:
        short = [
            Arrival(2 + index / rate, f"short{index}", Work(unlike(1000 + index, 40), 30))
            for index in range(int(seconds * rate))
        ]
        for name, mode in (("levels", "full"), ("first come, first served", "paged")):
            log = Run(make_machine(4096), mode, max_num_seqs=num_slots).serve([*long, *short], is_over=have_ended)
            ratios = [log.token_at_s[each.name][-1] / alone[each.name][-1] for each in long]
            num_ended = sum(len(log.token_at_s[each.name]) == 30 for each in short)
            waits = quantiles(log.waits_s[len(long) :])[:3] if len(log.waits_s) > len(long) else ["-"] * 3
            shares = (f"{sum(ratios) / len(ratios):.2f}", f"{max(ratios):.2f}")
            table.add_row(f"{rate:g}", name, *shares, str(num_ended), *waits, str(log.num_yielded))
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
        ttft = quantiles([log.token_at_s[each.name][0] - each.at_s for each in arrivals])
        recomputed = f"{log.num_recomputed / log.num_computed:.1%}"
        waits = quantiles(log.first_chunk_waits_s)
        table.add_row(mode, f"{log.share_in_time:.1%}", *waits, ttft[0], ttft[2], recomputed)
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
        gaps = log.gaps_s([chat.name for chat in chats], 5.0, until_s)
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


def show_budget(make_machine: Callable[[int], Machine]) -> Table:
    """What it costs to bound steps in time: prompts of hundreds of tokens and short answers, all at once."""
    table = Table(title="100 requests of 1,000 prompt tokens and 60 of output at once: what the bounds of steps cost")
    for column in ("steps", "tokens/s", "of the unbounded", "gap ms p50", "p99"):
        table.add_column(column, justify="right")
    work = [Arrival(0.0, f"r{index}", Work(unlike(index, 1000), 60)) for index in range(100)]
    names = [each.name for each in work]
    kinds: tuple[tuple[str, str, dict[str, float]], ...] = (
        ("512 tokens, however long", "paged", {}),
        ("50 ms", "full", {"first_chunk_s": 0.05}),
        ("50 ms, more where reading the weights takes much of it", "full", {}),
    )
    unbounded_s = None
    for name, mode, bounds in kinds:
        log = Run(make_machine(8192), mode, **bounds).serve(work)
        unbounded_s = unbounded_s or log.seconds
        gaps = quantiles([gap for gap in log.gaps_s(names) if gap < 1])  # not while somebody has made way
        rate = sum(len(each.work.prompt) + each.work.num_output for each in work) / log.seconds
        table.add_row(name, f"{rate:.0f}", f"{unbounded_s / log.seconds:.0%}", gaps[0], gaps[2])
    return table


def main() -> None:
    """Prints a table for each question."""
    parser = argparse.ArgumentParser(prog="python -m bench.levels", description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests of the mixed load (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.8, help="share of the capacity (default: %(default)s)")
    parser.add_argument("--real", action="store_true", help="first chunks and gaps on the default model, in real time")
    parser.add_argument("--real-long", action="store_true", help="long requests and a flood on the default model")
    parser.add_argument("--shared", action="store_true", help="with --real…: one thread, and only its time counts")
    parser.add_argument("--seconds", type=float, default=75, help="of the mixed load, --real (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=0.5, help="of its lengths, --real (default: %(default)s)")
    parser.add_argument("--long-tokens", type=int, default=2000, help="of a long request, --real-long")
    args = parser.parse_args()
    console = Console(width=160)
    if args.real or args.real_long:
        from bench import levels_real  # needs torch

        machine = levels_real.real_machine(is_shared=args.shared)
        if args.real:
            for table in levels_real.show_lateness(machine, args.seconds, args.load, args.scale):
                console.print(table)
            console.print(levels_real.show_gaps(machine))
        if args.real_long:
            console.print(show_flood(lambda num_blocks: machine, 4, args.long_tokens, rates=(8,)))
        return
    console.print(show_flood(SimulatedMachine))
    console.print(show_lateness(SimulatedMachine, args.requests, args.load, list(MODES)))
    console.print(show_gaps(SimulatedMachine))
    console.print(show_budget(SimulatedMachine))
    console.print(show_memory(SimulatedMachine))


if __name__ == "__main__":
    main()
