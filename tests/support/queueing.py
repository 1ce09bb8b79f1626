"""Short ways to make what the queue takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from common.types import Band, BlockUsage, ClaimRef, ModelLimits
from gateway.queueing.queue import Claim, QueueEntry, WorkerReport

T = TypeVar("T")
BLOCK_SIZE = 16


def entry(
    request_id: str,
    *,
    owner: str = "g1",
    model: str = "m",
    band: Band = Band.NORMAL,
    blocks: int = 1,
    tenant: str = "acme",
    weight: int = 1,
    input_tokens: int | None = None,
    is_resumed: bool = False,
    cached: Mapping[str, int] | None = None,
) -> QueueEntry:
    """A request that needs so many blocks, the last for one token only; all for input if nothing is said."""
    tokens = (blocks - 1) * BLOCK_SIZE + 1
    return QueueEntry(
        request_id,
        owner,
        model,
        tenant,
        band,
        input_tokens or tokens,
        tokens,
        weight,
        is_resumed=is_resumed,
        cached_blocks=cached or {},
    )


def report(
    worker_id: str = "w1",
    *,
    epoch: int = 1,
    seq: int = 1,
    slots: int = 4,
    blocks: int = 100,
    model: str = "m",
    max_num_seqs: int = 4,
    num_blocks: int = 100,
    accounted: Sequence[Claim] = (),
) -> WorkerReport:
    """What a worker with so many free slots and blocks says."""
    limits = ModelLimits(model, 4096, 1000, BLOCK_SIZE, num_blocks, max_num_seqs)
    usage = BlockUsage(
        seq=seq,
        empty=blocks,
        cached=0,
        referenced=num_blocks - blocks,
        swapping=0,
        running=max_num_seqs - slots,
        waiting=0,
        free_slots=slots,
        accounted=tuple(ClaimRef(claim.request_id, claim.attempt) for claim in accounted),
    )
    return WorkerReport(worker_id, epoch, limits, usage)


def ids(claims: Sequence[Claim]) -> list[str]:
    """The claimed requests, in order."""
    return [claim.request_id for claim in claims]


async def eventually(condition: Callable[[], Awaitable[T]], timeout_s: float = 60.0) -> T:
    """The first true result of a condition, asked again and again: the store's clock has no event to wait for."""
    async with asyncio.timeout(timeout_s):
        while not (result := await condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return result
