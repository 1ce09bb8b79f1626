"""Random lives of gateways, workers and requests: the scripts agree with the model, and never over-admit."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import redis

from common.types import Band
from gateway.queueing.queue import Claim, Flow, Place, WorkerReport
from gateway.store.keys import PoolKeys
from gateway.store.redis_queue import QueueSettings, RedisQueue
from tests.integration.store.queue_model import QueueModel
from tests.support.lives import live_many
from tests.support.queueing import BLOCK_SIZE, entry, report
from tests.support.redis import pool_keys, request_keys

GATEWAYS = ("g1", "g2", "g3")
SHAPES = {"w1": ("m", 4, 14), "w2": ("m", 3, 20), "w3": ("n", 2, 8)}  # worker -> model, slots, blocks
MODELS = ("m", "m", "m", "n", "absent")
SIZES = (1, 1, 2, 3, 5, 8, 12, 15, 20, 21)  # in blocks; the last fits no worker
TENANTS = {"acme": 1, "bolt": 1, "corp": 3, "dent": 7}  # tenant -> weight
NUM_STEPS = 150
FOR_EVER_S = 3600
QUEUE_SETTINGS = QueueSettings(
    max_overtakes=2,
    max_passed=3,
    claim_lease_s=FOR_EVER_S,
    report_ttl_s=FOR_EVER_S,
    owner_ttl_s=FOR_EVER_S,
    normal_share=0.2,
    low_share=0.1,
    normal_headroom=0.05,
    low_headroom=0.3,
    max_owed_tokens=400,
)
AGEING = {
    "no wait is long": (float(FOR_EVER_S), 4),
    "every wait is long": (0.0, 4),
}  # long_wait_s, claims_per_long_wait


@dataclass
class RealWorker:
    """What a worker process really holds, whatever the store believes."""

    worker_id: str
    epoch: int = 1
    seq: int = 1
    running: dict[str, tuple[Claim, int]] = field(default_factory=dict)  # request id -> claim, blocks
    unreported: dict[str, list[Claim]] = field(default_factory=dict)  # by gateway: in the numbers since its last usage

    def start(self, claim: Claim, blocks: int) -> None:
        self.running[claim.request_id] = claim, blocks
        self.unreported.setdefault(claim.owner, []).append(claim)
        self.seq += 1

    def stop(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.seq += 1

    def restart(self) -> None:
        self.epoch, self.seq = self.epoch + 1, 1
        self.running.clear()
        self.unreported.clear()

    def say(self, gateway: str) -> WorkerReport:
        model, slots, blocks = SHAPES[self.worker_id]
        return report(
            self.worker_id,
            epoch=self.epoch,
            seq=self.seq,
            slots=slots - len(self.running),
            blocks=blocks - sum(n for _, n in self.running.values()),
            model=model,
            max_num_seqs=slots,
            num_blocks=blocks,
            accounted=self.unreported.pop(gateway, []),
        )


class Fleet:
    """Three gateways on one store, three workers, and the dice that say what happens next."""

    def __init__(self, url: str, client: redis.Redis, dice: random.Random) -> None:
        long_wait_s, claims_per_long_wait = AGEING[dice.choice(list(AGEING))]
        settings = replace(QUEUE_SETTINGS, long_wait_s=long_wait_s, claims_per_long_wait=claims_per_long_wait)
        self.dice, self.client = dice, client
        self.pool = f"test-{secrets.token_hex(6)}"
        self.prefix = f"tidegate:{{{self.pool}}}:"
        self.queues = {it: RedisQueue(url, pool=self.pool, gateway_id=it, settings=settings) for it in GATEWAYS}
        self.model = QueueModel(settings)
        self.real = {worker: RealWorker(worker) for worker in SHAPES}
        self.said: list[WorkerReport] = []  # on their way
        self.submitted: set[tuple[str, int]] = set()
        self.num_requests = 0
        self.happened: Counter[str] = Counter()

    def living(self) -> list[str]:
        return [gateway for gateway in GATEWAYS if gateway not in self.model.dead]

    def any_queue(self) -> RedisQueue:
        return self.queues[self.dice.choice(self.living())]

    def claimed(self) -> list[Claim]:
        return [it.claim for it in self.model.requests.values() if it.claim and it.entry.owner not in self.model.dead]

    def unsubmitted(self) -> list[Claim]:
        return [claim for claim in self.claimed() if (claim.request_id, claim.attempt) not in self.submitted]

    async def enqueue(self) -> None:
        for _ in range(self.dice.randint(1, 4)):
            self.num_requests += 1
            tenant, blocks = self.dice.choice(list(TENANTS)), self.dice.choice(SIZES)
            item = entry(
                f"r{self.num_requests}",
                owner=self.dice.choice(self.living()),
                model=self.dice.choice(MODELS),
                band=self.dice.choice(tuple(Band)),
                blocks=blocks,
                tenant=tenant,
                weight=TENANTS[tenant],
                input_tokens=self.dice.randint(1, blocks * BLOCK_SIZE),
                is_resumed=self.dice.random() < 0.1,
                cached=self.cached(blocks),
            )
            await self.queues[item.owner].enqueue(item, max_length=10_000)
            self.model.enqueue(item)

    def cached(self, blocks: int) -> dict[str, int]:
        """What an owner believes: anything, also of workers that are not there."""
        workers = self.dice.sample((*SHAPES, "w9"), self.dice.randint(0, 3))
        return {worker: self.dice.randint(1, blocks) for worker in workers}

    async def report(self) -> None:
        worker = self.dice.choice(sorted(SHAPES))
        self.said.append(self.real[worker].say(self.dice.choice(GATEWAYS)))

    async def dispatch(self) -> None:
        """Reports arrive late and in any order, at any gateway."""
        self.dice.shuffle(self.said)
        count = self.dice.randint(0, len(self.said))
        arriving, self.said = self.said[:count], self.said[count:]
        await self.dispatch_with(arriving)

    async def report_and_dispatch(self) -> None:
        await self.dispatch_with([worker.say(self.dice.choice(self.living())) for worker in self.real.values()])

    async def dispatch_with(self, reports: list[WorkerReport]) -> None:
        claims = await self.any_queue().dispatch(reports)
        assert claims == self.model.dispatch(reports)
        self.happened["claim"] += len(claims)

    async def submit(self) -> None:
        for claim in self.unsubmitted():
            worker = self.real[claim.worker_id]
            if self.dice.random() < 0.7 and worker.epoch == claim.worker_epoch:
                self.submitted.add((claim.request_id, claim.attempt))
                tokens = self.model.requests[claim.request_id].entry.num_tokens_needed
                worker.start(claim, -(-tokens // BLOCK_SIZE))

    async def requeue(self) -> None:
        if claims := self.claimed():
            claim, place = self.dice.choice(claims), self.dice.choice(tuple(Place))
            item = self.model.requests[claim.request_id].entry
            input_tokens, tokens_needed = self.dice.randint(1, 100), self.dice.randint(1, 20 * BLOCK_SIZE)
            renewed = replace(
                item,
                num_input_tokens=input_tokens,
                num_tokens_needed=tokens_needed,
                cached_blocks=self.cached(-(-tokens_needed // BLOCK_SIZE)),
            )
            self.real[claim.worker_id].stop(claim.request_id)
            queue = self.queues[claim.owner]
            assert await queue.requeue(renewed, attempt=claim.attempt, place=place)
            assert not await queue.requeue(item, attempt=claim.attempt, place=place)
            self.model.undo_claim(claim.request_id, place, renewed)

    async def reach(self) -> None:
        """A gateway has lost a session, or found one."""
        gateway = self.dice.choice(self.living())
        reached = self.dice.sample((*SHAPES, "w9"), self.dice.randint(0, 4))
        await self.queues[gateway].reach(reached, ttl_s=FOR_EVER_S)
        self.model.reached[gateway] = reached

    async def charge(self) -> None:
        """Output of requests that run, and of a flow that the queue does not know."""
        flows = {self.model.requests[claim.request_id].entry.flow for claim in self.claimed()}
        tokens = {flow: self.dice.randint(0, 60) for flow in sorted(flows, key=str)}
        tokens[Flow("m", Band.LOW, "never-seen")] = self.dice.randint(0, 60)
        await self.any_queue().charge(tokens)
        self.model.charge(tokens)

    async def finish(self) -> None:
        live = [it for it in self.model.requests.values() if it.entry.owner in self.living()]
        running = [it for it in live if it.claim]
        for request in self.dice.sample(running, len(running) // 2) + self.dice.sample(live, min(len(live), 1)):
            item = request.entry
            if item.request_id in self.model.requests:
                for worker in self.real.values():
                    worker.stop(item.request_id)
                assert await self.queues[item.owner].finish(item.request_id)
                self.model.remove(item.request_id)

    async def let_a_lease_pass(self) -> None:
        if claims := self.unsubmitted():
            claim = self.dice.choice(claims)
            if self.client.zadd(self.prefix + "leases", {claim.request_id: 1}, xx=True, ch=True):
                self.model.reap()  # a heartbeat does so first
                self.model.undo_claim(claim.request_id, Place.SAME)
            await self.heartbeat()

    async def lose_worker(self) -> None:
        """A gateway lost its session, because the worker or only the connection went down."""
        worker = self.dice.choice(sorted(SHAPES))
        epoch = self.real[worker].epoch - self.dice.randint(0, 1)
        await self.any_queue().forget_worker(worker, epoch=epoch)
        known = self.model.workers.get(worker)
        if known is not None and known.newest.epoch <= epoch:
            known.is_forgotten = True
        if self.dice.random() < 0.5:
            self.real[worker].restart()

    async def kill_or_revive_gateway(self) -> None:
        if self.model.dead:
            await self.revive_gateway()
        else:
            self.kill_gateway(self.dice.choice(GATEWAYS))

    def kill_gateway(self, gateway: str) -> None:
        """Its sessions end, so workers stop its requests; its keys stay until somebody reaps them."""
        self.model.dead.add(gateway)
        self.client.zadd(self.prefix + "gateways", {gateway: 1})
        for worker in self.real.values():
            worker.unreported.pop(gateway, None)
            for claim, _ in list(worker.running.values()):
                if claim.owner == gateway:
                    worker.stop(claim.request_id)

    async def revive_gateway(self) -> None:
        """It was only slow: it is told what it lost, and goes on."""
        await self.heartbeat()
        gateway = self.model.dead.pop()
        lost = await self.queues[gateway].heartbeat(ttl_s=FOR_EVER_S)
        assert not set(lost) & set(self.model.requests)
        for request_id in lost:
            assert not await self.queues[gateway].finish(request_id)
        assert await self.queues[gateway].heartbeat(ttl_s=FOR_EVER_S) == []

    async def heartbeat(self) -> None:
        assert await self.any_queue().heartbeat(ttl_s=FOR_EVER_S) == []
        self.model.reap()

    def check_no_worker_is_promised_more_than_it_has(self) -> None:
        for worker_id, worker in self.real.items():
            _, slots, blocks = SHAPES[worker_id]
            known = self.model.workers.get(worker_id)
            promised = dict(worker.running)
            if known is not None and known.newest.epoch == worker.epoch:
                promised |= known.pending
            assert len(promised) <= slots
            assert sum(n for _, n in promised.values()) <= blocks

    def check_counters(self) -> None:
        """What is stored for idle flows would only show in later claims."""
        keys = PoolKeys(self.pool)
        for flow, counter in self.model.counters.items():
            assert self.client.hget(keys.flow(flow), "counter") == str(counter)
            ttl = self.client.ttl(keys.flow(flow))
            assert (ttl == -1) == bool(self.model.waiting(flow)), "only what waits is kept without an end"
        for (model, band), served in self.model.served.items():
            running = self.client.hget(keys.service(model), f"running:{int(band)}")
            assert int(running or 0) == served.running

    async def live(self) -> None:
        steps: dict[Callable[[], object], int] = {
            self.enqueue: 5,
            self.report: 3,
            self.dispatch: 3,
            self.report_and_dispatch: 5,
            self.submit: 5,
            self.finish: 4,
            self.requeue: 2,
            self.reach: 1,
            self.charge: 4,
            self.let_a_lease_pass: 1,
            self.lose_worker: 1,
            self.kill_or_revive_gateway: 1,
        }
        for gateway in GATEWAYS:
            await self.queues[gateway].heartbeat(ttl_s=FOR_EVER_S)
        for step in self.dice.choices(list(steps), list(steps.values()), k=NUM_STEPS):
            await step()  # type: ignore[misc]
            self.check_no_worker_is_promised_more_than_it_has()
        self.check_counters()
        self.happened["out of turn"] += self.model.num_out_of_turn
        for request_id, request in self.model.requests.items():
            if request.entry.owner in self.living():
                assert await self.queues[request.entry.owner].finish(request_id)
        await self.any_queue().heartbeat(ttl_s=FOR_EVER_S)
        assert request_keys(self.client, self.pool) == []

    async def close(self) -> None:
        for queue in self.queues.values():
            await queue.close()
        for key in pool_keys(self.client, self.pool):
            self.client.delete(key)


def test_the_scripts_agree_with_the_model(redis_url: str, redis_client: redis.Redis) -> None:
    happened = live_many(lambda dice: Fleet(redis_url, redis_client, dice), num_lives=30)
    assert happened["claim"] > 100, "lives without claims would show nothing"
    assert happened["out of turn"] > 10, "nor would lives in which no band gets its share out of turn"
