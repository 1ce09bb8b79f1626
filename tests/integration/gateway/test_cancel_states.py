"""A request that is given up, in whatever state, frees everything: queue, worker, reservation, its tenant's slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from common.types import Band
from gateway.admission.limits import TenantLimits
from gateway.app import GatewayApp
from gateway.live import LiveRequest
from gateway.tenants import Tenant
from protos.inference.v1 import types_pb2
from tests.integration.gateway.rig import KEYS, Client, Rig, eventually, generate_request, read
from tests.support.redis import held_keys
from tests.support.scripted_worker import MODEL, ScriptedWorker

LIMITS = TenantLimits(max_concurrent=1, tokens_per_minute=10_000_000)
ONE_AT_A_TIME = KEYS | {"key-acme": Tenant("acme", Band.NORMAL, limits=LIMITS)}
NO_CREDIT = types_pb2.REASON_NO_CREDIT


@dataclass
class Scene:
    """Two workers with a place each that do nothing by themselves, and a request of a tenant that may have one."""

    app: GatewayApp
    client: Client
    workers: list[ScriptedWorker]

    @property
    def live(self) -> LiveRequest:
        return self.app.dispatcher.live[0]

    async def taken(self) -> ScriptedWorker:
        """Until a worker has it; that one."""
        await eventually(lambda: any(worker.running for worker in self.workers))
        return next(worker for worker in self.workers if worker.running)

    async def streaming(self) -> ScriptedWorker:
        worker = await self.taken()
        for _ in range(3):
            await worker.step()
        await eventually(lambda: len(self.live.output_token_ids) == 3)
        return worker

    def refuse(self) -> None:
        for worker in self.workers:
            worker.reject = NO_CREDIT


async def queued(scene: Scene) -> None:
    """No worker has room."""
    assert scene.live.last_attempt == 0


async def refused(scene: Scene) -> None:
    """Every worker that gets it has no room after all."""
    await eventually(lambda: scene.live.num_refusals > 2)


async def dispatched(scene: Scene) -> None:
    await scene.taken()


async def streaming(scene: Scene) -> None:
    await scene.streaming()


async def paused(scene: Scene) -> None:
    """Its client does not read."""
    worker = await scene.taken()
    worker.tokens_per_step = 500
    [running], live = worker.running, scene.live
    async with asyncio.timeout(60):
        while not running.is_paused:
            assert worker.running, "all of it was on its way to a client that does not read"
            await worker.step()
            # What the gateway has not got yet does not fill the way to its client.
            await eventually(lambda: running.is_paused or len(live.output_token_ids) == running.position)


async def handed_back(scene: Scene) -> None:
    worker = await scene.streaming()
    scene.refuse()
    worker.hand_back(worker.running[0])
    await eventually(lambda: scene.live.num_hand_backs == 1)


async def lost(scene: Scene) -> None:
    worker = await scene.streaming()
    scene.refuse()
    await worker.kill()
    await eventually(lambda: scene.live.num_losses == 1)
    scene.workers.remove(worker)


STATES: list[Callable[[Scene], Awaitable[None]]] = [queued, refused, dispatched, streaming, paused, handed_back, lost]


@pytest.mark.parametrize("how", ["cancelled", "left"])
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
async def test_what_is_given_up_frees_everything(
    rig: Rig, redis_client: redis.Redis, pool: str, reach: Callable[[Scene], Awaitable[None]], how: str
) -> None:
    shape: dict[str, Any] = {"max_num_seqs": 1, "num_blocks": 10_000, "context_length": 100_000, "step_s": None}
    workers = [await rig.worker(worker_id=f"w{n}", **shape) for n in range(2)]
    for worker in workers:
        worker.is_draining = reach is queued
        worker.reject = NO_CREDIT if reach is refused else None
    app, other = await rig.serving(*workers, tenants_by_key=ONE_AT_A_TIME, max_unread_tokens=100)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
    client = await rig.client(app, options=[("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)])
    scene = Scene(app, other, workers)
    request = generate_request(request_id="r1", sampling={"max_tokens": 90_000}, return_token_ids=True)
    call = client.generate(request, timeout=60)
    assert (await anext(aiter(call))).HasField("accepted")
    await reach(scene)
    assert {"request", "running", "reservation"} <= {key.split(":")[2] for key in held_keys(redis_client, pool)}
    given_up_at = time.monotonic()
    if how == "left":
        call.cancel()
    else:
        await other.cancel("r1")
        answer = await read(call)
        assert answer.finished is not None
        assert answer.finished.reason == types_pb2.FINISH_REASON_CANCELLED
    await eventually(
        lambda: (
            not app.dispatcher.live
            and not any(worker.running for worker in scene.workers)
            and held_keys(redis_client, pool) == []
        )
    )
    print(f"{how} while {reach.__name__}: all of it free after {time.monotonic() - given_up_at:.3f} s")
    for worker in scene.workers:
        worker.reject, worker.is_draining = None, False
    again = asyncio.create_task(other.ask(sampling={"max_tokens": 1}))  # in the one slot that the tenant has
    await eventually(lambda: again.done() or any(worker.running for worker in scene.workers))
    for worker in scene.workers:
        await worker.step()
    assert (await again).error is None
