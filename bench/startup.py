"""How long a worker takes to serve, and how much memory it keeps under load: `python -m bench.startup`.

The starts are those of `python -m worker` alone, with the model on disk: once with kernels still to compile, then with
cached ones. The load goes through a whole deployment and fills every block of the KV pool.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import psutil

from bench.report import PAGE, machine, markdown_table, replace_block
from bench.workload import Work, mixed
from client.client import Client
from client.types import Sampling, Tokens
from common.default_model import ensure_default_model
from common.rpc.probe import wait_until_serving
from launcher.ports import free_ports
from launcher.process import Child
from launcher.stack import Stack, StackOptions
from worker.model.dtype import choose_dtype
from worker.model.weights import load_model

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".local" / "startup"
MIB = 2**20
OVERHEAD_MIB = 600  # interpreter, libraries, activations: what a worker may take besides weights and KV pool
START_LIMIT_S = 15.0
SAMPLE_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a worker process."""

    serving_s: float
    resident_mib: float


async def start_once(environment: dict[str, str]) -> Start:
    """Starts a worker, waits until its health says SERVING, and stops it."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    env = {**environment, "TIDEGATE_WORKER_LISTEN": address, "TIDEGATE_WORKER_METRICS_LISTEN": ""}
    begin = time.monotonic()
    child = await Child.start("worker", [sys.executable, "-m", "worker"], env, STATE)
    try:
        serving = asyncio.create_task(wait_until_serving(address))
        died = asyncio.create_task(child.died())
        await asyncio.wait({serving, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise died.result()
        seconds = time.monotonic() - begin
        died.cancel()
        return Start(seconds, psutil.Process(child.pid).memory_info().rss / MIB)
    finally:
        await child.stop(drain_s=10)


@asynccontextmanager
async def peak_resident(process: psutil.Process) -> AsyncIterator[list[float]]:
    """Samples a process's resident MiB into the yielded list until the scope is left."""
    samples: list[float] = []

    async def sample() -> None:
        while True:
            samples.append(process.memory_info().rss / MIB)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    sampling = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        sampling.cancel()


async def ask(client: Client, request: Work) -> None:
    """Takes one request to its end."""
    sampling = Sampling(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
    async for _ in client.generate(Tokens(request.prompt), sampling):
        pass


async def resident_under_load(num_requests: int) -> float:
    """The largest resident MiB of a worker while a deployment serves the mixed workload, all of it at once."""
    async with Stack(StackOptions(STATE), on_progress=print) as stack:
        worker = next(
            process
            for process in psutil.Process().children(recursive=True)
            if process.cmdline()[1:3] == ["-m", "worker"]
        )
        print(f"{num_requests} requests through the gateway")
        async with peak_resident(worker) as samples, Client(stack.gateway_address, stack.tenants[0].api_key) as client:
            await stack.run(_ask_all(client, mixed(num_requests)))
        return max(samples)


async def _ask_all(client: Client, work: list[Work]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for request in work:
            tasks.create_task(ask(client, request))


def weights_mib(path: Path) -> float:
    """Size of the weights in the dtype that a worker chooses here."""
    model = load_model(path, choose_dtype("auto"))
    return sum(tensor.numel() * tensor.element_size() for tensor in model.tensors.values()) / MIB


@dataclass(frozen=True, slots=True)
class Result:
    """All that was measured."""

    cold: Start
    warm: list[Start]
    loaded_mib: float
    weights_mib: float
    kv_cache_mib: int

    @property
    def serving_s(self) -> float:
        """Of a start with cached kernels."""
        return median(start.serving_s for start in self.warm)

    @property
    def allowed_mib(self) -> float:
        """What a worker may keep in memory."""
        return self.weights_mib + self.kv_cache_mib + OVERHEAD_MIB

    @property
    def is_within_limits(self) -> bool:
        """Whether neither start nor memory passes its limit."""
        return self.serving_s <= START_LIMIT_S and self.loaded_mib <= self.allowed_mib

    def rows(self) -> list[list[str]]:
        """The table: what was measured, and what is allowed."""
        parts = f"{self.weights_mib:.0f} MiB weights, {self.kv_cache_mib} MiB KV pool, at most {OVERHEAD_MIB} MiB else"
        return [
            ["", "measured", "allowed"],
            ["start to SERVING, kernels cached", f"{self.serving_s:.1f} s", f"{START_LIMIT_S:g} s"],
            ["start to SERVING, kernels compiled anew", f"{self.cold.serving_s:.1f} s", ""],
            ["resident when SERVING", f"{max(start.resident_mib for start in self.warm):.0f} MiB", ""],
            [f"resident under load ({parts})", f"{self.loaded_mib:.0f} MiB", f"{self.allowed_mib:.0f} MiB"],
        ]


async def measure(arguments: argparse.Namespace) -> Result:
    """Runs everything."""
    model = ensure_default_model(on_progress=print)
    os.environ |= {
        "TIDEGATE_WORKER_MODEL": str(model),
        "TIDEGATE_WORKER_KV_CACHE_MIB": str(arguments.kv_cache_mib),
        "TIDEGATE_WORKER_THREADS": str(arguments.threads),
    }
    with tempfile.TemporaryDirectory() as cache:
        print("starting a worker that compiles its kernels")
        cold = await start_once({**os.environ, "NUMBA_CACHE_DIR": cache})
        print(f"serving after {cold.serving_s:.1f} s")
        warm = []
        for _ in range(arguments.starts):
            warm.append(await start_once({**os.environ, "NUMBA_CACHE_DIR": cache}))
            print(f"serving after {warm[-1].serving_s:.1f} s, resident {warm[-1].resident_mib:.0f} MiB")
    loaded_mib = await resident_under_load(arguments.requests)
    return Result(cold, warm, loaded_mib, weights_mib(model), arguments.kv_cache_mib)


def main() -> None:
    """Measures, prints, and writes the table into docs/performance.md; exits with 1 if a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="starts with cached kernels; the median is reported")
    parser.add_argument("--requests", type=int, default=64, help="of the mixed workload, for the memory under load")
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-page", action="store_true", help="leave docs/performance.md alone")
    arguments = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    result = asyncio.run(measure(arguments))
    table = markdown_table(result.rows())
    print(table)
    if not arguments.no_page:
        command = " ".join(["python -m bench.startup", *sys.argv[1:]])
        heading = f"Measured {datetime.now(UTC):%Y-%m-%d} on {machine()}; {arguments.threads} compute threads.\n"
        replace_block(PAGE, "startup", f"{heading}Command: `{command}`\n\n{table}")
    sys.exit(0 if result.is_within_limits else 1)


if __name__ == "__main__":
    main()
