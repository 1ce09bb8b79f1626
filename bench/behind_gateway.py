"""Our server on the measured workloads, through its gateway: `python -m bench.behind_gateway`.

The same worker and model as `bench.engine`, in a process of its own, with Redis and a gateway; this process is the
client. What differs from the engine alone is the cost of gateway and wire, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.load.driver import Driver, Loop
from bench.load.record import LoadRequest, Record
from bench.load.target import Gateway
from bench.load.tenants import Origin, Sender
from bench.report import Measurement
from bench.workload import SUITE, Work, decode_only
from common.clock import SystemClock
from launcher.stack import Stack, StackOptions
from launcher.tenants import LocalTenant

NAME = "tidegate, gateway"
STATE = Path(".local") / "peers" / "deployment"
ANSWER_TIMEOUT_S = 1800.0


def tenants_for(names: Sequence[str]) -> dict[str, LocalTenant]:
    """One tenant for each workload: a tenant's prefixes are its own, so no workload finds another's in the cache."""
    return {
        name: LocalTenant(f"workload-{number}", "high", secrets.token_urlsafe(18)) for number, name in enumerate(names)
    }


async def measure(gateway: Gateway, sender: Sender, name: str, work: Sequence[Work]) -> Measurement:
    """Sends everything at once and takes it to the last token. Raises RuntimeError if a request fails or is short."""
    requests = [
        LoadRequest(index, name, Origin(sender), request.prompt, request.num_output)
        for index, request in enumerate(work)
    ]
    driver = Driver(gateway.send, SystemClock())
    seconds = await driver.run(requests, Loop(), asyncio.Event())
    records = driver.progress.records
    for record in records:
        if not record.is_completed or record.num_output != record.request.num_output:
            raise RuntimeError(f"{name}: a request ended {record.outcome} after {record.num_output} tokens")
    return Measurement(
        NAME,
        name,
        seconds,
        sum(len(request.prompt) for request in work),
        sum(record.num_output for record in records),
        ttft_ms=median_ms(records, "ttft_s"),
        tpot_ms=median_ms(records, "tpot_s"),
    )


def median_ms(records: Sequence[Record], name: str) -> float | None:
    """The median of one latency over those that have it."""
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return 1e3 * median(values) if values else None


async def run(names: Sequence[str]) -> None:
    """Starts a deployment, measures each workload, prints a line for programs for each."""
    warm_up = "warm-up"
    tenants = tenants_for([warm_up, *names])
    options = StackOptions(STATE, tenants=tuple(tenants.values()))
    async with Stack(options, on_progress=print) as stack:
        senders = {name: Sender(tenant.tenant_id, tenant.api_key) for name, tenant in tenants.items()}
        async with Gateway(stack.gateway_address, senders.values(), timeout_s=ANSWER_TIMEOUT_S) as gateway:
            await stack.run(measure(gateway, senders[warm_up], warm_up, decode_only(1, num_output=8)))
            for name in names:
                result = await stack.run(measure(gateway, senders[name], name, SUITE[name]()))
                print(result.to_line(), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.behind_gateway", description=__doc__)
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder (default: the default model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workload", action="append", choices=SUITE, help="only these; default: all")
    arguments = parser.parse_args()
    os.environ["TIDEGATE_WORKER_THREADS"] = str(arguments.threads)
    if arguments.model:
        os.environ["TIDEGATE_WORKER_MODEL"] = str(arguments.model)
    asyncio.run(run(arguments.workload or list(SUITE)))


if __name__ == "__main__":
    main()
