"""How a session shares the event loop with everything else."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from unittest.mock import Mock

from common.types import Band, SamplingParams
from gateway.placement.worker import Submission, TokensEvent, WorkerState
from gateway.rpc.worker_session import _TOKENS_PER_TURN, GrpcWorkerSession, SessionSettings
from protos.inference.v1 import worker_pb2

NUM_REQUESTS = 10 * _TOKENS_PER_TURN + 3


async def test_a_large_step_lets_others_have_their_turns() -> None:
    heard: list[str] = []

    def on_tokens(_worker_id: str, event: TokensEvent) -> None:
        heard.append(event.request_id)

    session = GrpcWorkerSession(Mock(), Mock(), Mock(on_tokens=on_tokens), SessionSettings("g1", "", 1.0, 30.0, 1.0))
    session._state = WorkerState.READY
    names = [f"acme/{number}" for number in range(NUM_REQUESTS)]
    for name in names:
        session.submit(Submission(name, 1, (1,), (), SamplingParams(seed=1, max_tokens=9), Band.NORMAL, ""))
    outputs = [
        worker_pb2.RequestOutput(request_id=f"{name}#{number}", attempt=1, token_ids=[7])
        for number, name in enumerate(names, start=1)
    ]
    seen = [0]

    async def others() -> None:
        while seen[-1] < NUM_REQUESTS:
            seen.append(len(heard))
            await asyncio.sleep(0)

    await asyncio.gather(session._on_step(worker_pb2.Step(outputs=outputs)), others())
    assert heard == names
    assert max(after - before for before, after in pairwise(seen)) <= _TOKENS_PER_TURN
