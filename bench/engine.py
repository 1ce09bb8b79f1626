"""Our engine in one process, without gateway or network, on the measured workloads: `python -m bench.engine`."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor

from bench.in_process import SESSION, EngineOptions, build_engine, build_runner
from bench.report import Measurement
from bench.workload import SUITE, Work, decode_only
from common.default_model import ensure_default_model
from common.types import SamplingParams
from worker.engine.batch import Batch, SampledToken
from worker.engine.engine import Engine
from worker.kernels import BACKENDS
from worker.model.loaded_model import LoadedModel
from worker.model.runner import ModelRunner
from worker.model.weights import load_model

MIB = 2**20


class TimedRunner(ModelRunner):
    """A runner that keeps how long its last step took, in seconds."""

    forward_s = 0.0  # inputs and forward pass
    execute_s = 0.0  # the same and sampling

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        start = time.perf_counter()
        sampled = super().execute(batch)
        self.execute_s = time.perf_counter() - start
        return sampled

    def compute(self, batch: Batch) -> Tensor:
        start = time.perf_counter()
        logits = super().compute(batch)
        self.forward_s = time.perf_counter() - start
        return logits


@dataclass(frozen=True, slots=True)
class Run:
    """One workload's measurement and where its time went, in seconds per step."""

    measurement: Measurement
    step_s: list[float]
    forward_s: list[float]
    sampling_s: list[float]
    host_s: list[float]  # scheduling, update, outputs
    num_preemptions: int

    def describe(self) -> str:
        """One line for people."""
        result = self.measurement
        parts = [
            f"{name} {1000 * median(times):.3f}"
            for name, times in (
                ("step", self.step_s),
                ("forward", self.forward_s),
                ("sampling", self.sampling_s),
                ("host", self.host_s),
            )
        ]
        return (
            f"{result.workload}: {result.output_rate:.1f} output tok/s, {result.total_rate:.1f} total tok/s, "
            f"{result.seconds:.1f} s, {len(self.step_s)} steps; median ms per step: {', '.join(parts)}; "
            f"host {100 * sum(self.host_s) / sum(self.step_s):.1f} % of all; {self.num_preemptions} preemptions"
        )


def measure(engine: Engine, runner: TimedRunner, name: str, work: Sequence[Work], max_num_seqs: int) -> Run:
    """Submits work as slots come free and steps until all is done.

    Raises RuntimeError if a request failed or made another number of tokens than asked for.
    """
    waiting = deque(enumerate(work))
    step_s, forward_s, sampling_s, host_s = [], [], [], []
    told_s: dict[str, list[float]] = {}
    num_made = num_preemptions = 0
    start = time.perf_counter()
    while waiting or engine.num_requests:
        step_start = time.perf_counter()
        while waiting and engine.num_requests < max_num_seqs:
            index, request = waiting.popleft()
            sampling = SamplingParams(seed=0, max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
            engine.submit(SESSION, f"{name}/{index}", 1, request.prompt, sampling)
        output = engine.step()
        for session in output.sessions.values():
            if session.rejected:
                raise RuntimeError(f"{name}: {session.rejected[0]}")
            for told in session.outputs:
                told_s.setdefault(told.request_id, []).append(time.perf_counter() - start)
        num_made += output.stats.num_sampled
        num_preemptions += output.stats.num_preemptions
        taken = time.perf_counter() - step_start
        step_s.append(taken)
        forward_s.append(runner.forward_s)
        sampling_s.append(runner.execute_s - runner.forward_s)
        host_s.append(taken - runner.execute_s)
    seconds = time.perf_counter() - start
    asked = sum(request.num_output for request in work)
    if num_made != asked:
        raise RuntimeError(f"{name}: {num_made} tokens were made, {asked} asked for")
    result = Measurement(
        "tidegate",
        name,
        seconds,
        sum(len(request.prompt) for request in work),
        num_made,
        ttft_ms=1e3 * median(each[0] for each in told_s.values()),
        tpot_ms=_median_tpot_ms(told_s.values()),
    )
    return Run(result, step_s, forward_s, sampling_s, host_s, num_preemptions)


def _median_tpot_ms(told_s: Iterable[Sequence[float]]) -> float | None:
    """Over requests, each given as the moments of its tokens; None if none has two."""
    values = [(each[-1] - each[0]) / (len(each) - 1) for each in told_s if len(each) > 1]
    return 1e3 * median(values) if values else None


def resident_mib() -> float:
    """This process's resident memory."""
    return float(psutil.Process().memory_info().rss / MIB)


def parse() -> argparse.Namespace:
    """The command line."""
    defaults = EngineOptions()
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder (default: the default model)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--backend", choices=BACKENDS, default=defaults.backend)
    parser.add_argument("--threads", type=int, default=defaults.num_threads)
    parser.add_argument("--kv-cache-mib", type=int, default=defaults.kv_cache_mib)
    parser.add_argument("--block-size", type=int, default=defaults.block_size)
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    parser.add_argument("--max-num-batched-tokens", type=int, default=defaults.max_num_batched_tokens)
    parser.add_argument(
        "--step-budget-ms",
        type=float,
        default=1000 * defaults.step_budget_s,
        help="a step's length while prompts are computed; 0: bound steps in tokens only (default: %(default)g)",
    )
    parser.add_argument("--workload", action="append", choices=SUITE, help="only these; default: all")
    return parser.parse_args()


def load(path: Path, options: EngineOptions) -> tuple[LoadedModel, TimedRunner]:
    """Loads, packs and warms up; prints how long each took and what stays in memory."""
    start, before = time.perf_counter(), resident_mib()
    model = load_model(path, options.dtype)
    loaded = time.perf_counter()
    weights_mib = sum(tensor.numel() * tensor.element_size() for tensor in model.tensors.values()) / MIB
    runner = build_runner(model, options, TimedRunner)
    assert isinstance(runner, TimedRunner)
    model.tensors.clear()
    packed = time.perf_counter()
    runner.warm_up()
    ready = time.perf_counter()
    print(
        f"loaded in {loaded - start:.2f} s, packed in {packed - loaded:.2f} s, warmed up in {ready - packed:.2f} s; "
        f"imports took {before:.0f} MiB; weights are {weights_mib:.0f} MiB, resident now {resident_mib():.0f} MiB"
    )
    return model, runner


def main() -> None:
    """Runs the workloads; prints a line for people and a line for programs for each."""
    arguments = parse()
    defaults = EngineOptions()
    options = EngineOptions(
        dtype=getattr(torch, arguments.dtype),
        backend=arguments.backend,
        kv_cache_mib=arguments.kv_cache_mib,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        step_budget_s=arguments.step_budget_ms / 1000 or defaults.step_budget_s,
        num_threads=arguments.threads,
    )
    model, runner = load(arguments.model or ensure_default_model(on_progress=print), options)
    work = {"warm-up": decode_only(1, num_output=8)}
    work |= {name: SUITE[name]() for name in arguments.workload or SUITE}
    for name, requests in work.items():
        # An empty prefix cache for each.
        engine, _ = build_engine(model, runner, options, now=time.monotonic if arguments.step_budget_ms else None)
        run = measure(engine, runner, name, requests, options.max_num_seqs)
        if name != "warm-up":
            print(run.describe())
            print(run.measurement.to_line(), flush=True)
    print(f"resident at the end {resident_mib():.0f} MiB, of which the KV pool at most {options.kv_cache_mib} MiB")


if __name__ == "__main__":
    main()
