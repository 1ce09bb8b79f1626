"""How a session shares the event loop with everything else, and whose tokens it passes on first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from unittest.mock import Mock

import pytest

from common.types import Band, SamplingParams
from gateway.placement.worker import Submission, TokensEvent, WorkerState
from gateway.rpc.turns import TurnBudget
from gateway.rpc.worker_session import _MAX_WAITING_EVENTS, GrpcWorkerSession, SessionSettings
from protos.inference.v1 import worker_pb2

PER_TURN = 8
NUM_REQUESTS = 10 * PER_TURN + 3


class Scene:
    """A session with submissions, and what it passes on of them: request and token, in order."""

    def __init__(self, turns: TurnBudget | None = None) -> None:
        self.heard: list[tuple[str, int]] = []
        listener = Mock(on_tokens=self._on_tokens)
        settings = SessionSettings("g1", "", 1.0, 30.0, 1.0)
        self.session = GrpcWorkerSession(Mock(), Mock(), listener, settings, turns or TurnBudget(PER_TURN))
        self.session._state = WorkerState.READY
        self._wire_ids: dict[str, str] = {}

    def _on_tokens(self, _worker_id: str, event: TokensEvent) -> None:
        self.heard.extend((event.request_id, token_id) for token_id in event.token_ids)

    def submit(self, *names: str) -> None:
        for name in names:
            sampling = SamplingParams(seed=1, max_tokens=9)
            self.session.submit(Submission(name, 1, (1,), (), sampling, Band.NORMAL, ""), is_alone=False)
            self._wire_ids[name] = f"{name}#{len(self._wire_ids) + 1}"

    def step(self, names: Sequence[str], token_id: int) -> worker_pb2.SessionEvent:
        outputs = [
            worker_pb2.RequestOutput(request_id=self._wire_ids[name], attempt=1, token_ids=[token_id]) for name in names
        ]
        return worker_pb2.SessionEvent(step=worker_pb2.Step(outputs=outputs))


async def sent(*events: worker_pb2.SessionEvent) -> AsyncIterator[worker_pb2.SessionEvent]:
    for event in events:
        yield event


async def test_large_steps_of_several_workers_let_others_have_their_turns() -> None:
    turns = TurnBudget(PER_TURN)
    scenes, names = [Scene(turns) for _ in range(3)], [f"acme/{number}" for number in range(NUM_REQUESTS)]
    for scene in scenes:
        scene.submit(*names)
    seen = [0]

    async def others() -> None:
        while seen[-1] < len(scenes) * NUM_REQUESTS:
            seen.append(sum(len(scene.heard) for scene in scenes))
            await asyncio.sleep(0)

    passing = (scene.session._on_event(scene.step(names, 7)) for scene in scenes)
    await asyncio.gather(*passing, others())
    assert all(scene.heard == [(name, 7) for name in names] for scene in scenes)
    in_turns = [after - before for before, after in pairwise(seen)]
    assert max(in_turns) <= PER_TURN
    assert in_turns.count(PER_TURN) >= len(in_turns) - 3, "and no turn is left unused"


async def test_a_turn_after_a_pause_has_all_of_its_budget() -> None:
    turns = TurnBudget(PER_TURN)
    assert await turns.take(PER_TURN) == PER_TURN
    assert await turns.take(PER_TURN) == PER_TURN  # waited in line
    for _ in range(3):
        await asyncio.sleep(0)
    with pytest.raises(StopIteration) as at_once:  # the call itself ends: it waits for no turn
        turns.take(PER_TURN).send(None)
    assert at_once.value.value == PER_TURN


async def test_a_first_token_does_not_wait_for_those_of_others() -> None:
    scene, names = Scene(), [f"acme/{number}" for number in range(NUM_REQUESTS)]
    scene.submit(*names)
    await scene.session._on_event(scene.step(names, 1))
    scene.heard.clear()
    scene.submit("acme/new")
    steps = [scene.step(names, 2), scene.step([*names, "acme/new"], 3), scene.step(["acme/new", *names], 4)]
    await asyncio.gather(scene.session._read(sent(*steps)), scene.session._pass_on())
    assert scene.heard.index(("acme/new", 3)) <= PER_TURN, "it went ahead"
    for name in (*names, "acme/new"):
        of_it = [token_id for heard, token_id in scene.heard if heard == name]
        assert of_it == ([3, 4] if name == "acme/new" else [2, 3, 4]), "and each request's tokens kept their order"


async def test_what_came_before_the_end_is_passed_on_and_no_more_is_read_than_that_can_keep_up_with() -> None:
    scene = Scene()
    scene.submit("acme/one")
    num_steps = 3 * _MAX_WAITING_EVENTS
    num_read = 0

    async def steps() -> AsyncIterator[worker_pb2.SessionEvent]:
        nonlocal num_read
        for number in range(num_steps):
            num_read += 1
            yield scene.step(["acme/one"], number)

    reading = asyncio.create_task(scene.session._read(steps()))
    for _ in range(4 * _MAX_WAITING_EVENTS):
        await asyncio.sleep(0)
    assert num_read == _MAX_WAITING_EVENTS + 1, "and waits with that one"
    await asyncio.gather(reading, scene.session._pass_on())
    assert scene.heard == [("acme/one", number) for number in range(num_steps)]
