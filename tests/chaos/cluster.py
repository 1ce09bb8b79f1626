"""Gateways, workers and Redis as processes, each reachable through a link that can be cut."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
import redis.asyncio

from client import Client, ClientError
from common.local_redis import find_redis_server
from gateway.store.keys import PoolKeys
from tests.chaos.namespace import Namespace
from tests.chaos.node import Node, Span, eventually
from tests.support.redis import pool_keys

FLEET_KEY = "chaos-fleet-key"
POOL = "chaos"
DRAIN_S = 3.0
HEARTBEAT_TTL_S = 6.0
MAX_CONCURRENT = 3
REQUESTS_PER_MINUTE = 40
TENANTS = {
    "paying": ("high", {}),
    "regular": ("normal", {}),
    "batch": ("low", {}),
    "limited": ("normal", {"max_concurrent": MAX_CONCURRENT, "requests_per_minute": REQUESTS_PER_MINUTE}),
}


def key_of(tenant: str) -> str:
    """A tenant's API key."""
    return f"chaos-key-of-{tenant}"


def _quiet_ports(count: int) -> list[int]:
    """Free ones below those that the kernel gives away: nobody gets them either while their program is away."""
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.sample(range(12_000, 32_000), 10 * count):
            try:
                taken = held.enter_context(socket.socket())
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    assert len(ports) >= count, "hardly a port is free"
    return ports[:count]


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 0.5):
            return True
    except OSError:
        return False


class Link:
    """A way to an address, which can be cut without either end being told."""

    def __init__(self, name: str, listen: str, target: str, folder: Path) -> None:
        self.address = listen

        async def is_ready() -> bool:
            return await asyncio.to_thread(_answers, listen)

        command = [sys.executable, str(Path(__file__).with_name("forwarder.py")), listen, target]
        self.node = Node(name, command, {}, folder, is_ready)

    def cut(self) -> None:
        """From now on nothing comes through, and nothing is refused."""
        self.node.freeze()

    def mend(self) -> None:
        """What was sent meanwhile comes through, late."""
        self.node.thaw()


@dataclass(frozen=True, slots=True)
class Server:
    """A gateway, a worker or Redis, and the link that others reach it by (a gateway: that it reaches Redis by)."""

    node: Node
    address: str
    metrics: str
    link: Link | None = None

    def metric(self, name: str) -> float:
        """The sum over a metric's labels."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((name + " ", name + "{"))]
        return sum(map(float, values))


class Cluster:
    """`start`, then `close`. `heal` brings everything that was harmed back."""

    def __init__(self, folder: Path, model: Path, *, num_gateways: int = 2, num_workers: int = 2) -> None:
        self.folder = folder
        ports = iter(f"127.0.0.1:{port}" for port in _quiet_ports(1 + 3 * num_gateways + 3 * num_workers))
        self.redis = self._redis(next(ports))
        self._tenants_file()
        self.gateways = [self._gateway(index, next(ports), next(ports), next(ports)) for index in range(num_gateways)]
        self.workers = [
            self._worker(f"worker-{index}", model, next(ports), next(ports), next(ports))
            for index in range(num_workers)
        ]
        self.model = model
        self._ways: dict[str, list[Link]] = {}  # of workers that were added
        self._clients: dict[tuple[str, int], Client] = {}

    # Building

    def _redis(self, address: str) -> Server:
        async def is_ready() -> bool:
            return await asyncio.to_thread(self._redis_answers)

        (self.folder / "redis").mkdir()
        port = address.rpartition(":")[2]
        command = [str(find_redis_server()), "--port", port, "--bind", "127.0.0.1", "--dir", str(self.folder / "redis")]
        # Written before it is answered: with everysec a slow disk puts writes off, which a kill then loses.
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "no", "--logfile", ""]
        return Server(Node("redis", command, {}, self.folder, is_ready), address, "")

    def _redis_answers(self) -> bool:
        try:
            with self.store() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _tenants_file(self) -> None:
        entries = [
            {
                "id": name,
                "key_sha256": hashlib.sha256(key_of(name).encode()).hexdigest(),
                "band": band,
                "limits": limits,
            }
            for name, (band, limits) in TENANTS.items()
        ]
        (self.folder / "tenants.json").write_text(json.dumps({"tenants": entries}))

    def _gateway(self, index: int, address: str, metrics: str, way: str) -> Server:
        name = f"gateway-{index}"
        link = Link(f"{name}-to-redis", way, self.redis.address, self.folder)

        async def is_ready() -> bool:
            return await self._num_workers(index) == sum(worker.node.is_running for worker in self.workers)

        env = {
            "TIDEGATE_FLEET_KEY": FLEET_KEY,
            "TIDEGATE_REDIS_URL": f"redis://{link.address}",
            "TIDEGATE_GATEWAY_LISTEN": address,
            "TIDEGATE_GATEWAY_METRICS_LISTEN": metrics,
            "TIDEGATE_GATEWAY_TENANTS_FILE": str(self.folder / "tenants.json"),
            "TIDEGATE_GATEWAY_POOL": POOL,
            "TIDEGATE_GATEWAY_GATEWAY_ID": name,
            "TIDEGATE_GATEWAY_DRAIN_S": str(DRAIN_S),
            "TIDEGATE_GATEWAY_MAX_ATTEMPTS": "20",  # harm is done more often here than anywhere else
            "TIDEGATE_GATEWAY_HEARTBEAT_TTL_S": str(HEARTBEAT_TTL_S),
            # Nothing is given up that a slow machine may still come to.
            "TIDEGATE_GATEWAY_NO_WORKER_TIMEOUT_S": "300",
            "TIDEGATE_GATEWAY_STORE_WAIT_S": "300",
            "TIDEGATE_GATEWAY_QUEUE_TTL_S": "300",
        }
        node = Node(name, [sys.executable, "-m", "gateway"], env, self.folder, is_ready)
        return Server(node, address, metrics, link)

    def _worker(self, name: str, model: Path, address: str, metrics: str, way: str) -> Server:
        link = Link(f"to-{name}", way, address, self.folder)
        node = self.worker_node(
            name, model, {"LISTEN": address, "METRICS_LISTEN": metrics, "ADVERTISE": link.address}, address
        )
        return Server(node, address, metrics, link)

    def worker_node(
        self, name: str, model: Path, settings: dict[str, str], address: str, before: Sequence[str] = ()
    ) -> Node:
        """A worker with more settings; `before` stands in front of its command."""

        async def is_ready() -> bool:
            return await _is_serving(address)

        defaults = {
            "MODEL": str(model),
            "MODEL_NAME": "tiny",
            "DTYPE": "float32",
            "THREADS": "1",
            "KV_CACHE_MIB": "3",  # 6,144 tokens: less than the load would like
            "MAX_NUM_SEQS": "12",
            "GATEWAYS": ",".join(gateway.address for gateway in self.gateways),
            "WORKER_ID": name,
            "DRAIN_S": str(DRAIN_S),
        }
        env = {f"TIDEGATE_WORKER_{key}": value for key, value in (defaults | settings).items()}
        env["TIDEGATE_FLEET_KEY"] = FLEET_KEY
        return Node(name, [*before, sys.executable, "-m", "worker"], env, self.folder, is_ready)

    # Running

    def silences(self, gateway: int) -> list[Span]:
        """When a gateway and the store were out of each other's reach."""
        server = self.gateways[gateway]
        assert server.link is not None
        store = self.redis.node
        return [*store.outages, *store.stops, *server.link.node.stops, *server.node.stops]

    @property
    def links(self) -> list[Link]:
        """All of them."""
        return [server.link for server in (*self.gateways, *self.workers) if server.link is not None]

    async def start(self) -> None:
        """Starts what does not run, mends every link, and waits until every gateway has a session with every worker."""
        for link in self.links:
            await link.node.start()
            link.mend()
        for server in (self.redis, *self.workers, *self.gateways):
            await server.node.start()
            server.node.thaw()
        for server in (self.redis, *self.workers, *self.gateways):
            await server.node.until_ready()

    heal = start

    async def close(self) -> None:
        """Ends everything."""
        for client in self._clients.values():
            await client.close()
        for server in (*self.gateways, *self.workers, self.redis):
            await server.node.kill()
        for link in self.links:
            await link.node.kill()

    def store(self) -> redis.Redis:
        """A plain blocking client of Redis, past every link."""
        port = int(self.redis.address.rpartition(":")[2])
        return redis.Redis(port=port, decode_responses=True, socket_timeout=60)

    @asynccontextmanager
    async def watching_store(self) -> AsyncIterator[Callable[[], Awaitable[list[float]]]]:
        """Gives a call that says for how many seconds longer each gateway is taken to live. It raises RedisError."""
        port = int(self.redis.address.rpartition(":")[2])
        async with redis.asyncio.Redis(port=port, socket_timeout=None) as client:

            async def signs_of_life() -> list[float]:
                pipeline = client.pipeline(transaction=False)
                pipeline.time()
                pipeline.zrange(PoolKeys(POOL).prefix + "gateways", 0, -1, withscores=True)
                (seconds, microseconds), gateways = await pipeline.execute()
                return [until / 1e6 - seconds - microseconds / 1e6 for _, until in gateways]

            yield signs_of_life

    def client(self, tenant: str, gateway: int) -> Client:
        """A client of a tenant at one of the gateways; all users share it."""
        at = (tenant, gateway)
        if at not in self._clients:
            self._clients[at] = Client(self.gateways[gateway].address, key_of(tenant))
        return self._clients[at]

    async def restart_redis(self, *, empty: bool) -> None:
        """SIGKILL, and a new start with what it had written, or with nothing."""
        await self.redis.node.kill()
        if empty:
            await asyncio.to_thread(shutil.rmtree, self.folder / "redis")
            (self.folder / "redis").mkdir()
        await self.redis.node.start()
        await self.redis.node.until_ready()

    async def until_seen(self, num_workers: int, gateways: Iterable[int] | None = None) -> None:
        """Waits until gateways have so many workers."""
        for index in range(len(self.gateways)) if gateways is None else gateways:
            await eventually(lambda index=index: self._has_workers(index, num_workers), f"{num_workers} workers seen")  # type: ignore[misc]

    async def _has_workers(self, gateway: int, num_workers: int) -> bool:
        return await self._num_workers(gateway) == num_workers

    async def _num_workers(self, gateway: int) -> int:
        """Workers with an open session; -1 if the gateway does not answer."""
        try:
            models = await self.client("regular", gateway).list_models(timeout_s=2.0)
        except ClientError:
            return -1
        return sum(model.num_workers for model in models)

    @property
    def gateway_ids(self) -> list[str]:
        """What the present starts of the gateways are called in the store."""
        return [gateway.node.events("gateway_started")[-1]["gateway_id"] for gateway in self.gateways]

    def is_reaped(self, gateway: str) -> bool:
        """Whether nothing is left in the store of what a gateway owned."""
        keys = PoolKeys(POOL)
        with self.store() as client:
            return not client.exists(keys.owned(gateway), keys.open_records(gateway), keys.inbox(gateway))

    async def add_worker_in(self, namespace: Namespace) -> Server:
        """One more worker, which has nothing but a cable to this machine."""
        address, metrics = f"{namespace.inside}:7001", f"{namespace.inside}:7002"
        ways = [
            Link(f"far-to-{gateway.node.name}", f"{namespace.outside}:{7010 + index}", gateway.address, self.folder)
            for index, gateway in enumerate(self.gateways)
        ]
        settings = {
            "LISTEN": address,
            "METRICS_LISTEN": metrics,
            "GATEWAYS": ",".join(way.address for way in ways),
            "MAX_NUM_SEQS": "12",
        }
        node = self.worker_node("far", self.model, settings, address, namespace.command)
        far = Server(node, address, metrics)
        self._ways[far.node.name] = ways
        self.workers.append(far)
        for way in ways:
            await way.node.start()
        await node.start()
        await node.until_ready()
        await self.until_seen(len(self.workers))
        return far

    async def remove_worker(self, worker: Server) -> None:
        """Ends it and its ways."""
        self.workers.remove(worker)
        await worker.node.kill()
        for way in self._ways.pop(worker.node.name):
            await way.node.kill()

    def stored_keys(self) -> list[str]:
        """All keys in the store."""
        with self.store() as client:
            return pool_keys(client, POOL)


async def _is_serving(address: str) -> bool:
    async with Client(address) as client:
        try:
            return await client.health("", timeout_s=1.0) == "SERVING"
        except ClientError:
            return False
