"""A request that is given up while a real engine has it, in whatever state, frees everything there, too."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from common.types import Band
from gateway.admission.limits import TenantLimits
from gateway.tenants import Tenant
from protos.inference.v1 import inference_pb2
from tests.integration.gateway.rig import KEYS, Client, Rig, eventually, generate_request
from tests.integration.worker.rig import WorkerRig
from tests.support.redis import held_keys
from tests.support.scripted_worker import VOCAB_SIZE, tokenizer_json
from worker.engine.request import Request, RequestState

LIMITS = TenantLimits(max_concurrent=1, tokens_per_minute=10_000)
NUM_PROMPT = 120  # tokens, several chunks


@dataclass
class Scene:
    """One worker with one slot that computes step by step, and a request that it has."""

    worker: WorkerRig
    other: Client  # of another tenant
    usurper: Any = None  # its call that has taken the slot

    @property
    def request(self) -> Request | None:
        """The request as the engine has it."""
        known = [it for of_session in self.worker.engine._requests.values() for it in of_session.values()]
        return next((it for it in known if it.request_id.startswith("acme/")), None)

    async def until(self, is_so: Callable[[Request], bool]) -> None:
        """Lets steps go by until something is so of the request."""

        def is_so_now() -> bool:
            if self.request is not None and is_so(self.request):
                return True
            self.worker.executor.gate.set()
            return False

        await eventually(is_so_now)


async def before_its_first_chunk(scene: Scene) -> None:
    await eventually(lambda: scene.request is not None and scene.request.state is RequestState.RUNNING)


async def prefilling(scene: Scene) -> None:
    await scene.until(lambda request: 0 < request.num_computed < NUM_PROMPT)


async def decoding(scene: Scene) -> None:
    await scene.until(lambda request: request.num_output_tokens > 3)


async def paused(scene: Scene) -> None:
    """As a gateway asks for whose client is slow to read."""
    await decoding(scene)
    request = scene.request
    assert request is not None
    scene.worker.loop.set_paused(request.session_id, request.request_id, request.attempt, True)
    await scene.until(lambda request: request.is_paused)


async def preempted(scene: Scene) -> None:
    """Another one has its slot."""
    await paused(scene)
    scene.usurper = scene.other.generate(generate_request("x", sampling={"max_tokens": 400}), timeout=60)
    await scene.until(lambda request: request.state is RequestState.WAITING)


STATES: list[Callable[[Scene], Awaitable[None]]] = [before_its_first_chunk, prefilling, decoding, paused, preempted]


@pytest.fixture
async def worker() -> AsyncIterator[WorkerRig]:
    async with WorkerRig(max_num_seqs=1, tokenizer=tokenizer_json(), vocab_size=VOCAB_SIZE).running() as worker:
        worker.executor.gate.clear()
        worker.executor.is_stepwise = True
        yield worker


@pytest.mark.parametrize("how", ["cancelled", "left"])
@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
async def test_what_is_given_up_frees_everything(
    rig: Rig,
    worker: WorkerRig,
    redis_client: redis.Redis,
    pool: str,
    reach: Callable[[Scene], Awaitable[None]],
    how: str,
) -> None:
    tenants = KEYS | {"key-acme": Tenant("acme", Band.NORMAL, limits=LIMITS)}
    app = await rig.gateway(workers=worker.address, tenants_by_key=tenants)
    client, other = await rig.client(app), await rig.client(app, "key-paid")
    await client.wait_serving()
    prompt = inference_pb2.TokenPrompt(token_ids=[97 + number % 26 for number in range(NUM_PROMPT)])
    request = generate_request(request_id="r1", tokens=prompt, sampling={"max_tokens": 100, "ignore_eos": True})
    call = client.generate(request, timeout=60)
    assert (await anext(aiter(call))).HasField("accepted")
    scene = Scene(worker, other)
    await reach(scene)
    given_up_at = time.monotonic()
    if how == "left":
        call.cancel()
    else:
        await client.cancel("r1")

    def is_free() -> bool:
        worker.executor.gate.set()
        return scene.request is None and not any("acme" in key for key in held_keys(redis_client, pool))

    await eventually(is_free)
    took_s = time.monotonic() - given_up_at
    if scene.usurper is not None:
        scene.usurper.cancel()

    def is_idle() -> bool:
        worker.executor.gate.set()
        of_engine = worker.engine.num_requests + worker.pool.counts.referenced
        return not (app.dispatcher.live or of_engine or held_keys(redis_client, pool))

    await eventually(is_idle)
    if scene.usurper is None:
        took_s = time.monotonic() - given_up_at
    print(f"{how} while {reach.__name__}: all of it free after {took_s:.3f} s")
