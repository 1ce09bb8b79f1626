"""What the levels do on the default model in real time, each run bounded in time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from rich.table import Table

from bench.in_process import EngineOptions, build_runner
from bench.levels import Arrival, Log, RealMachine, Run, poisson, quantiles, unlike
from bench.workload import Work, mixed
from common.default_model import ensure_default_model
from worker.engine.executor import Executor
from worker.model.weights import load_model

NUM_BLOCKS = 4096
NUM_SLOTS = 64
WARM_UP_S, CAPACITY_S = 10.0, 25.0
"""The capacity is what is computed between these moments with all slots taken."""

HUGE_AT_S, HUGE_TOKENS, HUGE_LIMIT_S = 4.0, 8000, 75.0


class OneCore(RealMachine):
    """A model on one core that it has for itself: time goes on by what this thread computes, and where it waits."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._waited_s = 0.0

    def now(self) -> float:
        """See Machine."""
        return time.thread_time() + self._waited_s

    def wait_until(self, at_s: float) -> None:
        """See Machine."""
        self._waited_s += max(0.0, at_s - self.now())


def real_machine(*, is_shared: bool) -> RealMachine:
    """The default model on this machine; every run uses the same blocks again. If others share the machine it computes
    in one thread and counts that thread's time only."""
    threads = 1 if is_shared else EngineOptions().num_threads
    options = EngineOptions(dtype=torch.bfloat16, num_blocks=NUM_BLOCKS, max_num_seqs=NUM_SLOTS, num_threads=threads)
    runner = build_runner(load_model(ensure_default_model(on_progress=print), options.dtype), options)
    runner.warm_up()
    return OneCore(runner) if is_shared else RealMachine(runner)


def show_lateness(machine: RealMachine, seconds: float, share: float, scale: float) -> Iterator[Table]:
    """The mixed load, lengths times `scale`, at a share of what is computed when all slots are taken."""
    capacity = _capacity(machine, scale)
    work = mixed(4000, seed=1, scale=scale)
    tokens_per_request = sum(len(each.prompt) + each.num_output for each in work) / len(work)
    rate = share * capacity / tokens_per_request
    arrivals = [arrival for arrival in poisson(work, rate) if arrival.at_s < seconds]
    log = Run(machine, "full").serve(arrivals, is_over=lambda log, at_s: at_s >= seconds)
    table = Table(
        title=f"First chunks under the mixed load (lengths times {scale:g}): capacity {capacity:.0f} tokens/s, "
        f"{len(log.waits_s)} requests in {log.seconds:.0f} s, {rate:.2f} per second, "
        f"steps run {sum(log.step_s) / log.seconds:.0%} of the time"
    )
    for column in ("within 100 ms + a step", "", "p50", "p90", "p99", "most"):
        table.add_column(column, justify="right")
    table.add_row(f"{log.share_in_time:.1%}", "arrival to first chunk, ms", *quantiles(log.waits_s))
    table.add_row("", "step, ms", *quantiles(log.step_s))
    table.add_row("", "gap between a request's tokens, ms", *quantiles(log.gaps_s(list(log.token_at_s))))
    yield table


def show_gaps(machine: RealMachine) -> Table:
    """Eight requests decode while a prompt of 8,000 tokens is computed."""
    chats = [Arrival(0.0, f"chat{index}", Work(unlike(index, 50), 4000)) for index in range(8)]
    huge = Arrival(HUGE_AT_S, "huge", Work(unlike(99, HUGE_TOKENS), 2))

    def is_over(log: Log, at_s: float) -> bool:
        return bool(log.token_at_s["huge"]) or at_s > HUGE_LIMIT_S

    log = Run(machine, "full").serve([*chats, huge], is_over=is_over)
    is_done = bool(log.token_at_s["huge"])
    until_s = log.token_at_s["huge"][0] if is_done else log.seconds
    taken = f"it took {until_s - HUGE_AT_S:.0f} s" if is_done else f"stopped after {until_s - HUGE_AT_S:.0f} s"
    table = Table(title=f"8 requests decode while a prompt of {HUGE_TOKENS:,} tokens is computed; {taken}")
    for column in ("", "p50", "p90", "p99", "most"):
        table.add_column(column, justify="right")
    names = [chat.name for chat in chats]
    table.add_row("gap before, ms", *quantiles(log.gaps_s(names, HUGE_AT_S / 2, HUGE_AT_S)))
    table.add_row("gap meanwhile, ms", *quantiles(log.gaps_s(names, HUGE_AT_S, until_s)))
    return table


def _capacity(machine: RealMachine, scale: float) -> float:
    """Tokens computed per second with all slots taken by the mixed load."""
    arrivals = [Arrival(0.0, f"r{index}", each) for index, each in enumerate(mixed(2000, seed=2, scale=scale))]
    run = Run(machine, "full", max_num_seqs=NUM_SLOTS)
    log = run.serve(arrivals, is_over=lambda log, at_s: at_s >= CAPACITY_S, in_flight=NUM_SLOTS)
    ends = zip(log.step_end_s, log.step_tokens, strict=True)
    return sum(tokens for at_s, tokens in ends if at_s >= WARM_UP_S) / (log.seconds - WARM_UP_S)
