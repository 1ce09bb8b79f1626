"""Random lives of gateways, workers and requests: the scripts agree with the model, and never over-admit."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.types import Band
from gateway.queueing.queue import Claim, Place, WorkerReport
from gateway.store.redis_queue import QueueSettings, RedisQueue
from tests.integration.store.queue_model import QueueModel
from tests.support.queueing import entry, report
from tests.support.redis import pool_keys, request_keys

GATEWAYS = ("g1", "g2", "g3")
SHAPES = {"w1": ("m", 3, 12), "w2": ("m", 2, 20), "w3": ("n", 2, 8)}  # worker -> model, slots, blocks
QUEUE_SETTINGS = QueueSettings(
    max_overtakes=2, max_passed=3, claim_lease_s=3600, report_ttl_s=3600, owner_ttl_s=3600, max_connections=1
)


@dataclass
class RealWorker:
    """What a worker process really holds, whatever the store believes."""

    worker_id: str
    epoch: int = 1
    seq: int = 1
    running: dict[str, tuple[Claim, int]] = field(default_factory=dict)
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


class QueueMachine(RuleBasedStateMachine):
    """One step is one thing that happens somewhere in the fleet."""

    url: str
    said = Bundle("said")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.pool = f"test-{secrets.token_hex(6)}"
        self.client = redis.Redis.from_url(self.url, decode_responses=True)
        self.queues = {
            gateway: RedisQueue(self.url, pool=self.pool, gateway_id=gateway, settings=QUEUE_SETTINGS)
            for gateway in GATEWAYS
        }
        self.prefix = f"tidegate:{{{self.pool}}}:"
        self.model = QueueModel(max_overtakes=QUEUE_SETTINGS.max_overtakes, max_passed=QUEUE_SETTINGS.max_passed)
        self.real = {worker: RealWorker(worker) for worker in SHAPES}
        self.submitted: set[tuple[str, int]] = set()
        self.names = 0
        for gateway in GATEWAYS:
            self.runner.run(self.queues[gateway].heartbeat(ttl_s=3600))

    def living(self) -> list[str]:
        return [gateway for gateway in GATEWAYS if gateway not in self.model.dead]

    def claimed(self, *, submitted: bool | None = None) -> list[Claim]:
        claims = [it.claim for it in self.model.requests.values() if it.claim and it.entry.owner not in self.model.dead]
        if submitted is None:
            return claims
        return [claim for claim in claims if ((claim.request_id, claim.attempt) in self.submitted) is submitted]

    @rule(
        gateway=st.integers(0, 9),
        model=st.sampled_from(["m", "m", "n", "absent"]),
        band=st.sampled_from(Band),
        blocks=st.integers(1, 14),
    )
    def enqueue(self, gateway: int, model: str, band: Band, blocks: int) -> None:
        owner = self.living()[gateway % len(self.living())]
        self.names += 1
        item = entry(f"r{self.names}", owner=owner, model=model, band=band, blocks=blocks)
        self.runner.run(self.queues[owner].enqueue(item, max_length=1000))
        self.model.enqueue(item)

    @rule(target=said, worker=st.sampled_from(sorted(SHAPES)), gateway=st.sampled_from(GATEWAYS))
    def report(self, worker: str, gateway: str) -> WorkerReport:
        return self.real[worker].say(gateway)

    @rule(gateway=st.integers(0, 9), reports=st.lists(consumes(said), max_size=4))
    def dispatch(self, gateway: int, reports: list[WorkerReport]) -> None:
        """Reports arrive in any order, at any gateway."""
        caller = self.living()[gateway % len(self.living())]
        assert self.runner.run(self.queues[caller].dispatch(reports)) == self.model.dispatch(reports)

    @rule(gateway=st.integers(0, 9), worker=st.sampled_from(sorted(SHAPES)))
    def report_and_dispatch(self, gateway: int, worker: str) -> None:
        caller = self.living()[gateway % len(self.living())]
        self.dispatch(gateway, [self.real[worker].say(caller)])

    @precondition(lambda self: self.claimed(submitted=False))
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claimed(submitted=False)))
        worker = self.real[claim.worker_id]
        if worker.epoch == claim.worker_epoch:
            self.submitted.add((claim.request_id, claim.attempt))
            tokens = self.model.requests[claim.request_id].entry.num_tokens_needed
            worker.start(claim, -(-tokens // report().limits.block_size))

    @precondition(lambda self: self.claimed())
    @rule(data=st.data(), place=st.sampled_from(Place))
    def requeue(self, data: st.DataObject, place: Place) -> None:
        claim = data.draw(st.sampled_from(self.claimed()))
        self.real[claim.worker_id].stop(claim.request_id)
        call = self.queues[claim.owner].requeue(
            claim.request_id, attempt=claim.attempt, place=place, num_input_tokens=1
        )
        assert self.runner.run(call)
        self.model.undo_claim(claim.request_id, resumed=place is Place.FIRST)

    @precondition(lambda self: any(it.entry.owner in self.living() for it in self.model.requests.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        live = [it.entry for it in self.model.requests.values() if it.entry.owner in self.living()]
        item = data.draw(st.sampled_from(live))
        for worker in self.real.values():
            worker.stop(item.request_id)
        assert self.runner.run(self.queues[item.owner].finish(item.request_id))
        self.model.remove(item.request_id)

    @precondition(lambda self: self.claimed(submitted=False))
    @rule(data=st.data())
    def let_a_lease_pass(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claimed(submitted=False)))
        if self.client.zadd(self.prefix + "leases", {claim.request_id: 1}, xx=True, ch=True):
            self.model.undo_claim(claim.request_id, resumed=False)
        self.heartbeat()

    @rule(worker=st.sampled_from(sorted(SHAPES)))
    def restart_worker(self, worker: str) -> None:
        self.real[worker].restart()

    @rule(worker=st.sampled_from(sorted(SHAPES)))
    def forget_worker(self, worker: str) -> None:
        epoch = self.real[worker].epoch
        self.runner.run(self.queues[self.living()[0]].forget_worker(worker, epoch=epoch))
        known = self.model.workers.get(worker)
        if known is not None and known.newest.epoch <= epoch:
            known.is_forgotten = True

    @precondition(lambda self: len(self.living()) > 1)
    @rule(data=st.data(), is_reaped=st.booleans())
    def kill_gateway(self, data: st.DataObject, is_reaped: bool) -> None:
        """Its sessions end, so workers stop its requests; its keys stay until somebody reaps them."""
        gateway = data.draw(st.sampled_from(self.living()))
        self.model.dead.add(gateway)
        self.client.zadd(self.prefix + "gateways", {gateway: 1})
        for worker in self.real.values():
            worker.unreported.pop(gateway, None)
            for claim, _ in list(worker.running.values()):
                if claim.owner == gateway:
                    worker.stop(claim.request_id)
        if is_reaped:
            self.heartbeat()

    def heartbeat(self) -> None:
        assert self.runner.run(self.queues[self.living()[0]].heartbeat(ttl_s=3600)) == []
        self.model.reap()

    @invariant()
    def no_worker_is_promised_more_than_it_has(self) -> None:
        for worker_id, worker in self.real.items():
            _, slots, blocks = SHAPES[worker_id]
            known = self.model.workers.get(worker_id)
            promised = dict(worker.running)
            if known is not None and known.newest.epoch == worker.epoch:
                promised |= known.pending
            assert len(promised) <= slots
            assert sum(n for _, n in promised.values()) <= blocks

    def teardown(self) -> None:
        try:
            for request_id, request in list(self.model.requests.items()):
                if request.entry.owner in self.living():
                    assert self.runner.run(self.queues[request.entry.owner].finish(request_id))
            self.runner.run(self.queues[self.living()[0]].heartbeat(ttl_s=3600))
            assert request_keys(self.client, self.pool) == []
        finally:
            for queue in self.queues.values():
                self.runner.run(queue.close())
            for key in pool_keys(self.client, self.pool):
                self.client.delete(key)
            self.client.close()
            self.runner.close()


def test_the_scripts_agree_with_the_model(redis_url: str) -> None:
    machine = type("QueueMachineOnRedis", (QueueMachine,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
