"""Gateways that dispatch at once never claim a request twice nor more than a worker has."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

from common.types import Band
from gateway.queueing.queue import Claim
from gateway.store.redis_queue import QueueSettings, RedisQueue
from tests.support.queueing import entry, report

NUM_GATEWAYS = 4
FOR_EVER = QueueSettings(claim_lease_s=600, report_ttl_s=600, owner_ttl_s=600, timeout_s=60)  # for any machine
NUM_REQUESTS = 200
SLOTS = {"w1": 5, "w2": 9, "w3": 16}
BLOCKS = {"w1": 40, "w2": 40, "w3": 40}


async def test_four_gateways_dispatching_at_once_never_over_admit(redis_url: str, pool: str) -> None:
    gateways = [RedisQueue(redis_url, pool=pool, gateway_id=f"g{i}", settings=FOR_EVER) for i in range(NUM_GATEWAYS)]
    owners = {gateway._gateway_id: gateway for gateway in gateways}
    blocks = {f"r{i}": 1 + i % 7 for i in range(NUM_REQUESTS)}
    await asyncio.gather(
        *(
            gateways[i % NUM_GATEWAYS].enqueue(
                entry(f"r{i}", owner=f"g{i % NUM_GATEWAYS}", band=Band(1 + i % 3), blocks=blocks[f"r{i}"]),
                max_length=NUM_REQUESTS,
            )
            for i in range(NUM_REQUESTS)
        )
    )
    served: Counter[str] = Counter()
    running: dict[str, dict[str, Claim]] = defaultdict(dict)
    for seq in range(1, 200):
        reports = [
            report(
                worker,
                seq=seq,
                slots=SLOTS[worker] - len(running[worker]),
                blocks=BLOCKS[worker] - sum(blocks[request_id] for request_id in running[worker]),
                max_num_seqs=SLOTS[worker],
                num_blocks=BLOCKS[worker],
                accounted=list(running[worker].values()),
            )
            for worker in SLOTS
        ]
        rounds = await asyncio.gather(*(gateway.dispatch(reports) for gateway in gateways for _ in range(2)))
        for claim in (claim for claims in rounds for claim in claims):
            served[claim.request_id] += 1
            running[claim.worker_id][claim.request_id] = claim
        for worker, claims in running.items():
            assert len(claims) <= SLOTS[worker]
            assert sum(blocks[request_id] for request_id in claims) <= BLOCKS[worker]
            for request_id in sorted(claims)[::2]:
                assert await owners[claims[request_id].owner].finish(request_id)
                del claims[request_id]
        if len(served) == NUM_REQUESTS and not any(running.values()):
            break
    assert served == Counter(blocks.keys()), "every request is claimed exactly once"
    for gateway in gateways:
        await gateway.close()


async def test_every_message_reaches_its_owner_while_all_dispatch(redis_url: str, pool: str) -> None:
    gateways = [RedisQueue(redis_url, pool=pool, gateway_id=f"g{i}", settings=FOR_EVER) for i in range(NUM_GATEWAYS)]
    for i in range(NUM_REQUESTS):
        await gateways[i % NUM_GATEWAYS].enqueue(entry(f"r{i}", owner=f"g{i % NUM_GATEWAYS}"), max_length=NUM_REQUESTS)
    received: Counter[str] = Counter()

    async def take(gateway: RedisQueue) -> None:
        for claim in await gateway.dispatch([report(slots=300, blocks=300, max_num_seqs=300, num_blocks=300)]):
            if claim.owner == gateway._gateway_id:
                received[claim.request_id] += 1
        while len(received) < NUM_REQUESTS:
            for message in await gateway.read_inbox(timeout_s=0.05):
                assert message.claim is not None
                assert message.claim.owner == gateway._gateway_id
                received[message.request_id] += 1

    async with asyncio.timeout(120):
        await asyncio.gather(*(take(gateway) for gateway in gateways))
    assert received == Counter(f"r{i}" for i in range(NUM_REQUESTS))
    for i in range(NUM_REQUESTS):
        assert await gateways[i % NUM_GATEWAYS].finish(f"r{i}")
    for gateway in gateways:
        await gateway.close()
