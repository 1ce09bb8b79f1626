"""What a gateway adds to tokens and requests, beside a worker without a model: `python -m bench.gateway`.

Redis, null workers in one process, one gateway program and this process, which is the clients, share the machine.
Tokens carry the time at which their worker sent them, so every delay is the gateway's, the wire's and this process's
together. So they are measured twice: by the crowd of clients, which is late itself, and by a few streams of a program
with nothing else to do (`bench/probe.py`), whose delays are what the gateway adds. What each of them takes of the
processors is measured too: where they have none left, delays say nothing of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median

import psutil

from bench.delays import Delays, stream
from bench.gateway_report import Plan, Result, describe, percentile
from bench.raw_client import RawClient
from bench.report import PAGE, replace_block
from common import event_loop
from common.local_redis import LocalRedis
from common.rpc.probe import wait_until_serving
from launcher.ports import free_ports
from launcher.process import Child

ROOT = Path(__file__).resolve().parent.parent
KEY = "bench-key"
PROMPT = "x" * 200
NUM_CONNECTIONS = 8
OUTPUT_TOKENS = (50, 150)  # of a streamed request, drawn evenly
ADMISSIONS_IN_FLIGHT = 128
MAX_LEDGER_RECORDS = 10_000  # so that a soak comes to the bound of the ledger, and memory to its own
NUM_SPARE_SLOTS = 64  # of the workers, beyond one for each stream
RAMP_S = 5.0
START_S = 60.0
MIB = 2**20
# By the thread's processor time: what other programs take of the machine does not count.
PROFILED = """
import cProfile, runpy, sys, time
path, profile = sys.argv.pop(1), cProfile.Profile(time.thread_time)
try:
    profile.runcall(runpy.run_module, "gateway", run_name="__main__", alter_sys=True)
finally:
    profile.dump_stats(path)
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor seconds so far, and memory in MiB now."""

    gateways: tuple[float, ...]  # of each process
    worker: float
    redis: float
    clients: float
    gateways_mib: float
    redis_mib: float


class Deployment:
    """A gateway program with all that it needs, and clients connected to it."""

    def __init__(
        self, address: str, clients: list[RawClient], gateway: Child, worker: Child, redis: LocalRedis
    ) -> None:
        self.address = address
        self.clients = clients
        root = psutil.Process(gateway.pid)
        self._gateways = [root, *root.children(recursive=True)]
        self._worker, self._redis = psutil.Process(worker.pid), psutil.Process(redis.pid)

    def usage(self) -> Usage:
        """What everything has used."""
        return Usage(
            gateways=tuple(sum(each.cpu_times()[:2]) for each in self._gateways),
            worker=sum(self._worker.cpu_times()[:2]),
            redis=sum(self._redis.cpu_times()[:2]),
            clients=time.process_time(),
            gateways_mib=float(sum(each.memory_info().rss for each in self._gateways)) / MIB,
            redis_mib=float(self._redis.memory_info().rss) / MIB,
        )


@asynccontextmanager
async def deployment(plan: Plan, source: Path) -> AsyncIterator[Deployment]:
    """Runs the gateway of a source tree beside this tree's null workers."""
    num_workers = -(-(plan.num_streams + NUM_SPARE_SLOTS) // plan.batch)
    gateway, *workers = (f"127.0.0.1:{port}" for port in free_ports(1 + num_workers))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        redis = stack.enter_context(LocalRedis())
        (folder / "tenants.json").write_text(json.dumps({"tenants": [_tenant()]}))
        flags = ["--rate", str(plan.rate), "--max-num-seqs", str(plan.batch)]
        command = [sys.executable, "-m", "bench.null_worker", *workers, *flags]
        children = [await Child.start("worker", command, os.environ, folder)]
        stack.push_async_callback(children[0].stop, drain_s=1.0)
        settings = {
            "TIDEGATE_REDIS_URL": redis.url,
            "TIDEGATE_GATEWAY_LISTEN": gateway,
            "TIDEGATE_GATEWAY_METRICS_LISTEN": "",
            "TIDEGATE_GATEWAY_WORKERS": ",".join(workers),
            "TIDEGATE_GATEWAY_TENANTS_FILE": str(folder / "tenants.json"),
            "TIDEGATE_GATEWAY_LOG_FORMAT": "json",
            "TIDEGATE_GATEWAY_LEDGER_MAX_RECORDS": str(MAX_LEDGER_RECORDS),
            "PYTHONPATH": str(source),
        }
        if plan.processes > 1:
            settings["TIDEGATE_GATEWAY_PROCESSES"] = str(plan.processes)
        program = ["-c", PROFILED, plan.profile] if plan.profile else ["-m", "gateway"]
        command = ["env", "-C", str(source), sys.executable, *program]
        children.append(await Child.start("gateway", command, {**os.environ, **settings}, folder))
        stack.push_async_callback(children[1].stop, drain_s=10.0)
        async with asyncio.timeout(START_S):
            await wait_until_serving(gateway)
        clients = [RawClient(gateway, KEY, PROMPT, number) for number in range(NUM_CONNECTIONS)]
        for client in clients:
            await stack.enter_async_context(client)
        yield Deployment(gateway, clients, children[1], children[0], redis)


def _tenant() -> dict[str, object]:
    """One whose limits are never reached, so that what they cost is measured too."""
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**9, "max_concurrent": 10**6}
    return {"id": "bench", "key_sha256": sha256(KEY.encode()).hexdigest(), "band": "normal", "limits": limits}


@asynccontextmanager
async def probing(system: Deployment, begin: float, seconds: float) -> AsyncIterator[Delays]:
    """Measures beside what is done inside; the delays are there at the end."""
    flags = ["--key", KEY, "--begin", str(begin), "--seconds", str(seconds)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.probe", system.address, *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    delays = Delays()
    try:
        yield delays
        output, _ = await process.communicate()
        found = json.loads(output)
        delays.ttft.extend(found["ttft"])
        delays.gap.extend(found["gap"])
        delays.num_failed = found["num_failed"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def measure_streams(plan: Plan, system: Deployment, random: Random) -> tuple[Delays, Delays, list[Usage]]:
    """Keeps `num_streams` streams open; returns their delays and those of a probe beside them, and what everything has
    used at the ends of equal intervals."""
    delays, ramp_end = Delays(), time.monotonic() + RAMP_S
    end = ramp_end + plan.seconds

    async def keep(number: int) -> None:
        await asyncio.sleep(RAMP_S * 0.8 * number / plan.num_streams)
        while time.monotonic() < end:
            num_tokens = random.randint(*OUTPUT_TOKENS)
            await stream(system.clients[number % NUM_CONNECTIONS], num_tokens, delays, ramp_end)

    async with probing(system, ramp_end, plan.seconds) as of_probe, asyncio.TaskGroup() as tasks:
        for number in range(plan.num_streams):
            tasks.create_task(keep(number))
        await asyncio.sleep(ramp_end - time.monotonic())
        used = [system.usage()]
        num_intervals = max(1, round(plan.seconds / 10))
        for number in range(num_intervals):
            await asyncio.sleep(max(0.0, ramp_end + plan.seconds * (number + 1) / num_intervals - time.monotonic()))
            used.append(system.usage())
        num_tokens = len(delays.transit)
    del delays.transit[num_tokens:], delays.gap[num_tokens:]
    return delays, of_probe, used


async def measure_admissions(plan: Plan, system: Deployment) -> tuple[float, float, int]:
    """Admissions a second of one-token requests, many at once; the gateway's CPU seconds for each; how many failed."""
    end = time.monotonic() + plan.admission_s
    count = failed = 0

    async def keep(client: RawClient) -> None:
        nonlocal count, failed
        while time.monotonic() < end:
            is_served = await client.complete(1, timeout_s=60)
            count += is_served
            failed += not is_served

    cpu_s, begin = sum(system.usage().gateways), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(ADMISSIONS_IN_FLIGHT):
            tasks.create_task(keep(system.clients[number % NUM_CONNECTIONS]))
    elapsed_s = time.monotonic() - begin
    return count / elapsed_s, (sum(system.usage().gateways) - cpu_s) / max(count, 1), failed


async def measure(plan: Plan, source: Path) -> Result:
    """Measures the gateway of one source tree."""
    async with deployment(plan, source) as system:
        await measure_admissions_warm(system)
        rate, cpu_s, num_failed = await measure_admissions(plan, system)
        delays, of_probe, used = await measure_streams(plan, system, Random(1))
        failures = sum((client.failures for client in system.clients), Counter[str]())
    for failure, count in failures.most_common(5):
        print(f"{count} requests failed: {failure}")
    num_tokens, first, last = len(delays.transit), used[0], used[-1]
    by_process = [after - before for before, after in zip(first.gateways, last.gateways, strict=True)]
    stream_cpu_s = sum(by_process)
    return Result(
        ttft_p50_ms=1e3 * percentile(of_probe.ttft, 50),
        ttft_p99_ms=1e3 * percentile(of_probe.ttft, 99),
        itl_p99_ms=1e3 * percentile(of_probe.gap, 99),
        crowd_ttft_p50_ms=1e3 * percentile(delays.ttft, 50),
        crowd_ttft_p99_ms=1e3 * percentile(delays.ttft, 99),
        crowd_itl_p99_ms=1e3 * percentile(delays.gap, 99),
        transit_p50_ms=1e3 * percentile(delays.transit, 50),
        transit_p99_ms=1e3 * percentile(delays.transit, 99),
        tokens_per_s=num_tokens / plan.seconds,
        cpu_us_per_token=1e6 * stream_cpu_s / num_tokens,
        gateway_cpu=stream_cpu_s / plan.seconds,
        worker_cpu=(last.worker - first.worker) / plan.seconds,
        redis_cpu=(last.redis - first.redis) / plan.seconds,
        clients_cpu=(last.clients - first.clients) / plan.seconds,
        shares=tuple(sorted((it / stream_cpu_s for it in by_process if it > 0.01 * stream_cpu_s), reverse=True)),
        admissions_per_s=rate,
        admission_cpu_ms=1e3 * cpu_s,
        num_failed=num_failed + delays.num_failed + of_probe.num_failed,
        resident_mib=tuple(it.gateways_mib for it in used),
        redis_mib=tuple(it.redis_mib for it in used),
    )


async def measure_admissions_warm(system: Deployment) -> None:
    """Lets everything be used once before anything is measured."""
    async with asyncio.timeout(START_S):
        await asyncio.gather(*(client.wait_until_served() for client in system.clients))


async def measure_all(plan: Plan, sources: dict[str, Path], rounds: int) -> tuple[dict[str, list[Result]], float]:
    """Every gateway in turn, so that the machine's other work meets all of them; and how many cores that took."""
    results: dict[str, list[Result]] = {name: [] for name in sources}
    busy: list[float] = []
    for number in range(rounds):
        for name, source in sources.items():
            busy.append(await _busy_cores())
            results[name].append(await measure(plan, source))
            print(f"round {number + 1}, {name}: {results[name][-1]}", flush=True)
    return results, median(busy)


async def _busy_cores() -> float:
    """Cores that are busy while nothing is measured."""
    psutil.cpu_percent()
    await asyncio.sleep(2.0)
    return psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure what a gateway adds to tokens and requests.")
    parser.add_argument("--streams", type=int, default=500, help="streams at once")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each")
    parser.add_argument("--batch", type=int, default=64, help="requests of a null worker, which step together")
    parser.add_argument("--seconds", type=float, default=30.0, help="of streaming that are measured; a soak is 600")
    parser.add_argument("--admission-seconds", type=float, default=10.0, help="of admissions at saturation")
    parser.add_argument("--processes", type=int, default=1, help="processes of the gateway program")
    parser.add_argument("--rounds", type=int, default=1, help="how often; medians are reported")
    parser.add_argument("--baseline", type=Path, help="another source tree, whose gateway is measured in turn")
    parser.add_argument("--profile", default="", help="file for a cProfile of the gateway's main thread")
    parser.add_argument("--write", action="store_true", help="write the result into docs/performance.md")
    arguments = parser.parse_args()
    plan = Plan(
        arguments.streams,
        arguments.rate,
        arguments.batch,
        arguments.seconds,
        arguments.admission_seconds,
        arguments.processes,
        arguments.profile,
    )
    sources = {"before": arguments.baseline.resolve()} if arguments.baseline else {}
    sources["now" if sources else "gateway"] = ROOT
    outcome: list[str] = []

    async def program() -> None:
        results, busy = await measure_all(plan, sources, arguments.rounds)
        outcome.append(describe(plan, results, busy))

    gc.freeze()
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    event_loop.run(program())
    print(outcome[0])
    if arguments.write:
        replace_block(PAGE, "gateway", outcome[0])


if __name__ == "__main__":
    main()
