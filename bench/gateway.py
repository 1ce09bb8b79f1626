"""What a gateway adds to tokens and requests, beside a worker without a model: `python -m bench.gateway`.

Redis, a null worker, one gateway program and this process, which is the clients, share the machine. Tokens carry the
time at which the null worker sent them, so every delay is the gateway's, the wire's and this process's together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median

import psutil

from bench.null_worker import STAMP_CHARS, run, seconds_since
from bench.report import machine, markdown_table, replace_block
from client.client import Client, ClientOptions
from client.types import Delta, Finished, Sampling, Text
from common.local_redis import redis_url
from common.rpc.probe import wait_until_serving
from launcher.ports import free_ports
from launcher.process import Child

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
KEY = "bench-key"
PROMPT = "x" * 200
NUM_CONNECTIONS = 8
OUTPUT_TOKENS = (50, 150)  # of a streamed request, drawn evenly
ADMISSIONS_IN_FLIGHT = 128
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


@dataclass(slots=True)
class Delays:
    """Seconds, one for each token or request of a measurement."""

    ttft: list[float] = field(default_factory=list)  # first token received - request sent; the worker sends it at once
    transit: list[float] = field(default_factory=list)  # received - sent, of every token
    gap: list[float] = field(default_factory=list)  # gap between receipts - gap between sends, of consecutive tokens
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One gateway, measured once."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    transit_p50_ms: float
    transit_p99_ms: float
    tokens_per_s: float
    cpu_us_per_token: float
    gateway_cpu: float  # of one core, while it streamed
    clients_cpu: float
    admissions_per_s: float
    admission_cpu_ms: float
    num_failed: int
    resident_mib: tuple[float, ...]  # of the gateway, in equal intervals


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    num_streams: int
    rate: float
    batch: int
    seconds: float
    admission_s: float
    processes: int
    profile: str


class Deployment:
    """A gateway program with all that it needs, and clients connected to it."""

    def __init__(self, clients: list[Client], gateway: Child) -> None:
        self.clients = clients
        root = psutil.Process(gateway.pid)
        family = [root, *root.children(recursive=True)]
        self._gateways = [each for each in family if "redis" not in each.name()]

    def cpu_s(self) -> float:
        """Processor seconds of the gateway's processes so far."""
        return sum(sum(each.cpu_times()[:2]) for each in self._gateways)

    def resident_mib(self) -> float:
        """Memory of the gateway's processes now."""
        return float(sum(each.memory_info().rss for each in self._gateways)) / MIB


@asynccontextmanager
async def deployment(plan: Plan, source: Path) -> AsyncIterator[Deployment]:
    """Runs the gateway of a source tree beside this tree's null worker."""
    worker, gateway = (f"127.0.0.1:{port}" for port in free_ports(2))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        url = stack.enter_context(redis_url(None))
        (folder / "tenants.json").write_text(json.dumps({"tenants": [_tenant()]}))
        flags = ["--rate", str(plan.rate), "--batch", str(plan.batch), "--max-num-seqs", str(plan.num_streams + 64)]
        command = [sys.executable, "-m", "bench.null_worker", "--listen", worker, *flags]
        children = [await Child.start("worker", command, os.environ, folder)]
        stack.push_async_callback(children[0].stop, drain_s=1.0)
        settings = {
            "TIDEGATE_REDIS_URL": url,
            "TIDEGATE_GATEWAY_LISTEN": gateway,
            "TIDEGATE_GATEWAY_METRICS_LISTEN": "",
            "TIDEGATE_GATEWAY_WORKERS": worker,
            "TIDEGATE_GATEWAY_TENANTS_FILE": str(folder / "tenants.json"),
            "TIDEGATE_GATEWAY_LOG_FORMAT": "json",
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
        clients = [await stack.enter_async_context(_client(gateway, number)) for number in range(NUM_CONNECTIONS)]
        yield Deployment(clients, children[1])


def _tenant() -> dict[str, object]:
    """One whose limits are never reached, so that what they cost is measured too."""
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**9, "max_concurrent": 10**6}
    return {"id": "bench", "key_sha256": sha256(KEY.encode()).hexdigest(), "band": "normal", "limits": limits}


def _client(address: str, number: int) -> Client:
    # Channels with equal arguments would share one connection.
    return Client(address, KEY, options=ClientOptions(keepalive_timeout_s=20.0 + number))


async def stream(client: Client, num_tokens: int, delays: Delays, begin: float) -> None:
    """One request; its delays count from `begin` (monotonic seconds) on."""
    sent = time.monotonic()
    last: float | None = None
    is_finished = False
    async with aclosing(client.generate(Text(PROMPT), Sampling(max_tokens=num_tokens), timeout_s=120)) as events:
        async for event in events:
            if isinstance(event, Delta):
                now = time.monotonic()
                for start in range(0, len(event.text), STAMP_CHARS):
                    transit = seconds_since(int(event.text[start : start + STAMP_CHARS], 16), now)
                    if now >= begin:
                        delays.transit.append(transit)
                        if last is not None:
                            delays.gap.append(transit - last)
                        elif sent >= begin:
                            delays.ttft.append(now - sent)
                    last = transit
            is_finished = is_finished or isinstance(event, Finished)
    delays.num_failed += not is_finished


async def measure_streams(plan: Plan, system: Deployment, random: Random) -> tuple[Delays, list[float], float, float]:
    """Keeps `num_streams` streams open; returns delays, memory in intervals, and CPU seconds of gateway and clients."""
    delays, ramp_end = Delays(), time.monotonic() + RAMP_S
    end = ramp_end + plan.seconds

    async def keep(number: int) -> None:
        await asyncio.sleep(RAMP_S * 0.8 * number / plan.num_streams)
        while time.monotonic() < end:
            num_tokens = random.randint(*OUTPUT_TOKENS)
            await stream(system.clients[number % NUM_CONNECTIONS], num_tokens, delays, ramp_end)

    async with asyncio.TaskGroup() as tasks:
        for number in range(plan.num_streams):
            tasks.create_task(keep(number))
        await asyncio.sleep(ramp_end - time.monotonic())
        own, cpu_s, resident = time.process_time(), system.cpu_s(), [system.resident_mib()]
        num_intervals = max(1, round(plan.seconds / 10))
        for _ in range(num_intervals):
            await asyncio.sleep(plan.seconds / num_intervals)
            resident.append(system.resident_mib())
        cpu_s, own = system.cpu_s() - cpu_s, time.process_time() - own
        num_tokens = len(delays.transit)
    del delays.transit[num_tokens:], delays.gap[num_tokens:]
    return delays, resident, cpu_s, own


async def measure_admissions(plan: Plan, system: Deployment) -> tuple[float, float]:
    """Admissions a second of one-token requests, many at once, and the gateway's CPU seconds for each."""
    end = time.monotonic() + plan.admission_s
    count = 0

    async def keep(client: Client) -> None:
        nonlocal count
        while time.monotonic() < end:
            await client.complete(Text(PROMPT), Sampling(max_tokens=1), timeout_s=60)
            count += 1

    cpu_s, begin = system.cpu_s(), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(ADMISSIONS_IN_FLIGHT):
            tasks.create_task(keep(system.clients[number % NUM_CONNECTIONS]))
    elapsed_s = time.monotonic() - begin
    return count / elapsed_s, (system.cpu_s() - cpu_s) / count


async def measure(plan: Plan, source: Path) -> Result:
    """Measures the gateway of one source tree."""
    async with deployment(plan, source) as system:
        await measure_admissions_warm(system)
        rate, cpu_s = await measure_admissions(plan, system)
        delays, resident, stream_cpu_s, clients_s = await measure_streams(plan, system, Random(1))
    num_tokens = len(delays.transit)
    return Result(
        ttft_p50_ms=1e3 * percentile(delays.ttft, 50),
        ttft_p99_ms=1e3 * percentile(delays.ttft, 99),
        itl_p99_ms=1e3 * percentile(delays.gap, 99),
        transit_p50_ms=1e3 * percentile(delays.transit, 50),
        transit_p99_ms=1e3 * percentile(delays.transit, 99),
        tokens_per_s=num_tokens / plan.seconds,
        cpu_us_per_token=1e6 * stream_cpu_s / num_tokens,
        gateway_cpu=stream_cpu_s / plan.seconds,
        clients_cpu=clients_s / plan.seconds,
        admissions_per_s=rate,
        admission_cpu_ms=1e3 * cpu_s,
        num_failed=delays.num_failed,
        resident_mib=tuple(resident),
    )


async def measure_admissions_warm(system: Deployment) -> None:
    """Lets everything be used once before anything is measured."""
    await asyncio.gather(*(client.complete(Text(PROMPT), Sampling(max_tokens=4)) for client in system.clients))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1).__int__()] if ordered else 0.0


def table(results: dict[str, list[Result]]) -> list[list[str]]:
    """Medians of the rounds of every gateway; with two of them, a column of ratios."""
    rows = [["", *results]]
    for name, label, digits in ROWS:
        values = [median(getattr(each, name) for each in rounds) for rounds in results.values()]
        rows.append([label, *(f"{value:.{digits}f}" for value in values)])
        if len(values) == 2:
            rows[-1].append(f"{values[1] / values[0]:.2f}" if values[0] else "-")
    if len(results) == 2:
        rows[0].append("ratio")
    return rows


ROWS = (
    ("ttft_p50_ms", "added TTFT P50 (ms)", 1),
    ("ttft_p99_ms", "added TTFT P99 (ms)", 1),
    ("itl_p99_ms", "added ITL P99 (ms)", 1),
    ("transit_p50_ms", "token on its way P50 (ms)", 1),
    ("transit_p99_ms", "token on its way P99 (ms)", 1),
    ("tokens_per_s", "tokens/s delivered", 0),
    ("cpu_us_per_token", "gateway CPU per token (µs)", 1),
    ("gateway_cpu", "gateway CPU while streaming (cores)", 2),
    ("clients_cpu", "clients' CPU while streaming (cores)", 2),
    ("admissions_per_s", "admissions/s at saturation", 0),
    ("admission_cpu_ms", "gateway CPU per admission (ms)", 2),
    ("num_failed", "failed streams", 0),
)


def describe(plan: Plan, results: dict[str, list[Result]], busy: float) -> str:
    """The block of the document."""
    ours = results[list(results)[-1]][-1]
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    memory = " → ".join(f"{value:.0f}" for value in ours.resident_mib[:: max(1, len(ours.resident_mib) // 10)])
    processes = "one process" if plan.processes == 1 else f"{plan.processes} processes"
    return "\n".join(
        [
            f"{now}, {machine()}. Just before, other work took {busy:.1f} of its cores, with a load average of "
            f"{os.getloadavg()[2]:.0f}: what that work takes away is in every figure but CPU per token and admission.",
            f"{plan.num_streams} streams at {plan.rate:g} tokens/s each for {plan.seconds:g} s, {processes}, "
            f"worker batches of {plan.batch}; medians of {len(results[list(results)[-1]])} round(s).",
            "",
            markdown_table(table(results)),
            "",
            f"The gateway's resident memory over that time, in MiB: {memory}.",
        ]
    )


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
    parser.add_argument("--batch", type=int, default=64, help="requests of the null worker that step together")
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

    run(program())
    print(outcome[0])
    if arguments.write:
        replace_block(PAGE, "gateway", outcome[0])


if __name__ == "__main__":
    main()
