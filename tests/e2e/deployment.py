"""Real programs as processes: any number of gateways and workers on one Redis, and nothing left of them afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from client import Client
from common.default_model import ensure_default_model
from common.rpc.probe import wait_until_serving
from launcher.ports import free_ports
from launcher.process import Child

START_TIMEOUT_S = 240.0
TENANTS = {"paying": "high", "regular": "normal", "batch": "low"}
FLEET_KEY = "e2e-fleet-key"


def key_of(tenant: str) -> str:
    """A tenant's API key."""
    return f"e2e-key-of-{tenant}"


class Deployment:
    """What `deployment` has started; addresses are host:port."""

    def __init__(self, gateways: list[Child], workers: list[Child], addresses: list[str], metrics: list[str]) -> None:
        self.gateways = gateways
        self.workers = workers
        self.addresses = addresses  # of the gateways
        self.worker_metrics = metrics

    def client(self, tenant: str = "regular", gateway: int = 0) -> Client:
        """A client of a tenant at one of the gateways."""
        return Client(self.addresses[gateway], key_of(tenant))


@asynccontextmanager
async def deployment(
    folder: Path, redis_url: str, pool: str, *, num_gateways: int = 1, num_workers: int = 1, **worker_settings: str
) -> AsyncIterator[Deployment]:
    """Starts everything in `folder` and waits until every gateway has a session with every worker."""
    ensure_default_model()
    ports = free_ports(num_gateways + 2 * num_workers)
    addresses = [f"127.0.0.1:{port}" for port in ports[:num_gateways]]
    listens = [f"127.0.0.1:{port}" for port in ports[num_gateways : num_gateways + num_workers]]
    metrics = [f"127.0.0.1:{port}" for port in ports[num_gateways + num_workers :]]
    tenants_file = folder / "tenants.json"
    entries = [
        {"id": name, "key_sha256": hashlib.sha256(key_of(name).encode()).hexdigest(), "band": band}
        for name, band in TENANTS.items()
    ]
    tenants_file.write_text(json.dumps({"tenants": entries}))
    shared = os.environ | {"TIDEGATE_FLEET_KEY": FLEET_KEY, "TIDEGATE_REDIS_URL": redis_url}
    settings = {"kv_cache_mib": "256", "dtype": "float32", "threads": "1"} | worker_settings
    children: list[Child] = []

    async def start(name: str, program: str, **program_settings: str) -> Child:
        prefix = f"TIDEGATE_{program.upper()}_"
        env = shared | {prefix + key.upper(): value for key, value in program_settings.items()}
        child = await Child.start(name, [sys.executable, "-m", program], env, folder)
        children.append(child)
        return child

    try:
        workers = [
            await start(
                f"worker-{index}",
                "worker",
                listen=listens[index],
                metrics_listen=metrics[index],
                gateways=",".join(addresses),
                worker_id=f"worker-{index}",
                drain_s="5",
                **settings,
            )
            for index in range(num_workers)
        ]
        gateways = [
            await start(
                f"gateway-{index}",
                "gateway",
                listen=address,
                metrics_listen="",
                tenants_file=str(tenants_file),
                pool=pool,
                drain_s="5",
            )
            for index, address in enumerate(addresses)
        ]
        built = Deployment(gateways, workers, addresses, metrics)
        await _until_ready(built, listens, children)
        yield built
    finally:
        for child in reversed(children):
            await child.stop(drain_s=15)


async def _until_ready(built: Deployment, listens: list[str], children: list[Child]) -> None:
    async def ready() -> None:
        for address in (*listens, *built.addresses):
            await wait_until_serving(address)
        for index in range(len(built.addresses)):
            async with built.client(gateway=index) as client:
                while [model.num_workers for model in await client.list_models()] != [len(listens)]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    waiting = asyncio.create_task(ready())
    deaths = [asyncio.create_task(child.died()) for child in children]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await asyncio.wait([waiting, *deaths], return_when=asyncio.FIRST_COMPLETED)
        for death in deaths:
            if death.done():
                raise death.result()
        await waiting
    finally:
        for task in (waiting, *deaths):
            task.cancel()
        await asyncio.gather(waiting, *deaths, return_exceptions=True)
