"""What it gains to swap preempted requests out, rather than to compute them again: `python -m bench.swap`.

Users ask for long answers over long prompts and for short ones, each again as soon as it is answered, in a pool that
holds a part of what their requests need: long requests make way and return. The same requests are served without host
memory and with it, in turn. Then all long prompts are asked once more, to see what is found of them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean, median

import torch
from rich.console import Console
from rich.table import Table

from bench.in_process import SESSION, EngineOptions, build_engine, build_runner
from bench.report import PAGE, machine, markdown_table, replace_block
from bench.workload import FIRST_TOKEN_ID, LAST_TOKEN_ID, Kind, Work
from common.default_model import ensure_default_model
from common.types import SamplingParams
from worker.cache.host import CopyOrders
from worker.cache.manager import CacheManager
from worker.cache.swap import BlockCopier
from worker.engine.budget import Budget
from worker.engine.engine import Engine
from worker.engine.events import StepOutput
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.model.loaded_model import LoadedModel
from worker.model.weights import load_model

SHORT = Kind("short", up_to=0.7, prompt=(20, 120), output=(20, 60))
LONG = Kind("long", up_to=1.0, prompt=(500, 900), output=(200, 300))
BLOCK_SIZE = 16
MIB = 2**20


def crowd(num_requests: int, *, seed: int = 0) -> list[Work]:
    """Short and long requests, drawn; no two share a block."""
    rng = random.Random(seed)
    work = []
    for _ in range(num_requests):
        kind = SHORT if rng.random() < SHORT.up_to else LONG
        prompt = tuple(rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(rng.randint(*kind.prompt)))
        work.append(Work(prompt, rng.randint(*kind.output)))
    return work


def is_long(work: Work) -> bool:
    """Whether it is one of the long requests."""
    return work.num_output >= LONG.output[0]


class TimedCopier(BlockCopier):
    """A copier that adds up how long the steps waited for it, in seconds."""

    waited_s = 0.0

    def begin(self, orders: CopyOrders) -> None:
        """See Copier.begin."""
        started = time.perf_counter()
        super().begin(orders)
        self.waited_s += time.perf_counter() - started


@dataclass(slots=True)
class Run:
    """What became of the same requests, without host memory or with it."""

    seconds: float = 0.0
    cpu_s: float = 0.0  # of all threads
    num_output: int = 0
    num_computed: int = 0  # tokens that passed through the model
    num_preemptions: int = 0
    num_recomputed: int = 0  # tokens
    num_saved: int = 0  # tokens, to the host
    num_loaded: int = 0  # tokens, from the host
    waited_s: float = 0.0  # for copies
    thrash: list[float] = field(default_factory=list)  # as the scheduler sees it in each step
    first_s: dict[str, float] = field(default_factory=dict)  # from submission to the first token
    end_s: dict[str, float] = field(default_factory=dict)  # from submission to the end
    num_found: int = 0  # tokens of prompts that were in the pool or the host already

    def finish_s(self, share: float) -> float:
        """The quantile of the time from submission to the end."""
        return quantile(self.end_s.values(), share)

    def first_token_s(self, share: float) -> float:
        """The quantile of the time from submission to the first token."""
        return quantile(self.first_s.values(), share)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that so many are not above. Raises IndexError without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def serve(engine: Engine, work: Sequence[Work], num_users: int) -> Run:
    """Has so many users send the work, each the next request when its last has ended.

    Raises RuntimeError if a request failed.
    """
    run = Run()
    waiting = list(enumerate(work))[::-1]
    sent_s: dict[str, float] = {}
    started, cpu_started = time.perf_counter(), time.process_time()
    while waiting or engine.num_requests:
        while waiting and engine.num_requests < num_users:
            index, request = waiting.pop()
            sampling = SamplingParams(seed=0, max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
            sent_s[f"r{index}"] = time.perf_counter()
            engine.submit(SESSION, f"r{index}", 1, request.prompt, sampling)
        _observe(run, engine.step(), sent_s)
    run.seconds = time.perf_counter() - started
    run.cpu_s = time.process_time() - cpu_started
    return run


def _observe(run: Run, output: StepOutput, sent_s: Mapping[str, float]) -> None:
    stats, now_s = output.stats, time.perf_counter()
    run.num_output += stats.num_sampled
    run.num_computed += stats.num_tokens
    run.num_preemptions += stats.num_preemptions
    run.num_recomputed += stats.num_recomputed_tokens
    run.num_saved += stats.num_saved_tokens
    run.num_loaded += stats.num_loaded_tokens
    run.thrash.append(stats.thrash_ratio)
    for news in output.sessions.values():
        if news.rejected:
            raise RuntimeError(f"a request failed: {news.rejected[0]}")
        for told in news.outputs:
            since_s = now_s - sent_s[told.request_id]
            run.first_s.setdefault(told.request_id, since_s)
            run.end_s[told.request_id] = since_s
            run.num_found += told.cached_prompt_tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """The work, and its long prompts asked once more; and what the decision between copying and computing knew."""

    crowd: Run
    again: Run
    num_asked_again: int  # prompt tokens
    copy_s: float  # of a block, one way; 0 without host memory
    compute_s: float  # of a block's tokens behind a prompt of middle length


class Bench:
    """The model on a pool that is too small for its users."""

    def __init__(self, model: LoadedModel, options: EngineOptions, num_users: int, swap_mib: int) -> None:
        self._model = model
        self._options = options
        self._num_users = num_users
        self._runner = build_runner(model, options)
        self._runner.warm_up()
        num_slots = swap_mib * MIB // self._runner.storage.layout.block_bytes
        self._copier = TimedCopier(self._runner.storage, num_slots)

    def run(self, work: Sequence[Work], *, has_host: bool) -> Pair:
        """One engine, empty at first, serves the work."""
        copier = self._copier if has_host else None
        budgets: list[Budget] = []

        def make_scheduler(manager: CacheManager, config: SchedulerConfig) -> Scheduler:
            scheduler = Scheduler(manager, config)
            budgets.append(scheduler.budget)
            return scheduler

        engine, _ = build_engine(
            self._model, self._runner, self._options, make_scheduler, time.perf_counter, copier=copier
        )
        waited_s = self._copier.waited_s
        done = serve(engine, work, self._num_users)
        done.waited_s = self._copier.waited_s - waited_s
        prompts = [each.prompt for each in work if is_long(each)]
        again = serve(engine, [Work(prompt, 1) for prompt in prompts], self._num_users)
        size = self._options.block_size
        return Pair(
            crowd=done,
            again=again,
            num_asked_again=sum(map(len, prompts)),
            copy_s=copier.block_s if copier else 0.0,
            compute_s=budgets[0].recompute_s(sum(LONG.prompt) // 2, size),
        )

    def close(self) -> None:
        """Ends the threads."""
        self._copier.close()
        self._runner.close()


def recomputed_share(run: Run) -> float:
    """Recomputed / useful tokens."""
    return run.num_recomputed / (run.num_computed - run.num_recomputed)


Figure = tuple[str, str, Callable[[Pair], float]]
"""Name, format and what it is."""

FIGURES: tuple[Figure, ...] = (
    ("output tokens/s", ".1f", lambda pair: pair.crowd.num_output / pair.crowd.seconds),
    ("output tokens per CPU second", ".1f", lambda pair: pair.crowd.num_output / pair.crowd.cpu_s),
    ("P50 of the time to the end, s", ".2f", lambda pair: pair.crowd.finish_s(0.5)),
    ("P99 of the time to the end, s", ".2f", lambda pair: pair.crowd.finish_s(0.99)),
    ("P50 of the time to the first token, s", ".2f", lambda pair: pair.crowd.first_token_s(0.5)),
    ("P99 of the time to the first token, s", ".2f", lambda pair: pair.crowd.first_token_s(0.99)),
    ("preemptions", ".0f", lambda pair: pair.crowd.num_preemptions),
    ("tokens recomputed", ".0f", lambda pair: pair.crowd.num_recomputed),
    ("tokens copied out", ".0f", lambda pair: pair.crowd.num_saved),
    ("tokens copied in", ".0f", lambda pair: pair.crowd.num_loaded),
    ("recomputed / useful tokens, %", ".1f", lambda pair: 100 * recomputed_share(pair.crowd)),
    ("thrash ratio, mean of all steps, %", ".1f", lambda pair: 100 * fmean(pair.crowd.thrash)),
    ("steps waited for copies, % of the time", ".2f", lambda pair: 100 * pair.crowd.waited_s / pair.crowd.seconds),
    ("asked again: prompt tokens found, %", ".1f", lambda pair: 100 * pair.again.num_found / pair.num_asked_again),
    ("of these in the host, %", ".1f", lambda pair: 100 * pair.again.num_loaded / max(1, pair.again.num_found)),
)


def figures(off: Sequence[Pair], on: Sequence[Pair]) -> list[list[str]]:
    """Rows of a table, the header first: medians of both kinds of runs, and the median of each round's ratio."""
    rows = [["", "off", "on", "on / off"]]
    for name, form, figure in FIGURES:
        before, after = [figure(pair) for pair in off], [figure(pair) for pair in on]
        ratios = [new / old for old, new in zip(before, after, strict=True) if old]
        ratio = f"{median(ratios):.2f}" if ratios else ""
        rows.append([name, f"{median(before):{form}}", f"{median(after):{form}}", ratio])
    return rows


def table(rows: Sequence[Sequence[str]]) -> Table:
    """The figures on a terminal."""
    header, *body = rows
    result = Table(title="Without host memory and with it")
    for column in header:
        result.add_column(column, justify="right" if column else "left")
    for row in body:
        result.add_row(*row)
    return result


def decision(on: Sequence[Pair]) -> str:
    """What copying and computing a block took, as measured while serving."""
    copy_s, compute_s = median(pair.copy_s for pair in on), median(pair.compute_s for pair in on)
    return (
        f"A block of {BLOCK_SIZE} tokens: copied out and in {2e3 * copy_s:.3f} ms, "
        f"computed behind {sum(LONG.prompt) // 2} tokens {1e3 * compute_s:.2f} ms, {compute_s / 2 / copy_s:.0f}x."
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.swap", description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--users", type=int, default=12, help="requests that run or wait at a time")
    parser.add_argument("--slots", type=int, default=8, help="of them, those that run (default: %(default)s)")
    parser.add_argument("--pool-tokens", type=int, default=4096, help="of the KV cache (default: %(default)s)")
    parser.add_argument("--swap-mib", type=int, default=64, help="of host memory (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--page", action="store_true", help=f"write the table into {PAGE}")
    return parser.parse_args()


def main() -> None:
    """Runs the rounds, each in the other order than the one before; prints the table."""
    args = parse()
    options = EngineOptions(
        dtype=getattr(torch, args.dtype),
        num_blocks=1 + args.pool_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=args.slots,
        num_threads=args.threads,
    )
    model = load_model(ensure_default_model(on_progress=print), options.dtype)
    bench = Bench(model, options, args.users, args.swap_mib)
    work = crowd(args.requests)
    bench.run(crowd(args.slots, seed=1), has_host=False)  # the first steps on a machine are slow
    pairs: dict[bool, list[Pair]] = {False: [], True: []}
    for index in range(args.rounds):
        for has_host in (False, True) if index % 2 == 0 else (True, False):
            pairs[has_host].append(bench.run(work, has_host=has_host))
    bench.close()
    told = (
        f"{len(work)} requests, {sum(map(is_long, work))} of them long, {args.users} users, {args.slots} slots, a pool "
        f"of {args.pool_tokens} tokens, {args.swap_mib} MiB of host memory; medians of {args.rounds} round(s)."
    )
    rows, speeds = figures(pairs[False], pairs[True]), decision(pairs[True])
    console = Console()
    console.print(told, table(rows), speeds, sep="\n", highlight=False)
    if args.page:
        head = f"`python -m bench.swap --page`, {datetime.now(UTC):%Y-%m-%d}: {machine()}, {args.threads} threads.  "
        replace_block(PAGE, "swap", f"{head}\n{told}\n\n{markdown_table(rows)}\n\n{speeds}")


if __name__ == "__main__":
    main()
