"""Which worker gets a request: one that this gateway reaches, and if possible the one that has its beginning cached."""

from __future__ import annotations

import asyncio

from gateway.app import GatewayApp
from tests.integration.gateway.rig import Client, Rig, eventually
from tests.support.scripted_worker import MODEL, ScriptedWorker


async def two_workers(rig: Rig) -> tuple[list[ScriptedWorker], GatewayApp, Client]:
    workers = [await rig.worker(worker_id=f"w{number}", max_num_seqs=8) for number in (1, 2)]
    app, client = await rig.serving(*workers)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
    return workers, app, client


def prompts(worker: ScriptedWorker) -> list[str]:
    return [bytes(submit.prompt_token_ids).decode() for submit in worker.submitted]


async def test_what_begins_alike_goes_where_it_is_cached(rig: Rig) -> None:
    workers, _, client = await two_workers(rig)
    for number in range(6):
        for letter in "abc":
            assert (await client.ask(f"{letter * 64}{number}", sampling={"max_tokens": 2})).error is None
    places = {letter: {it.worker_id for it in workers if any(letter in p for p in prompts(it))} for letter in "abc"}
    assert [len(found) for found in places.values()] == [1, 1, 1]


async def test_the_next_turn_of_a_conversation_goes_where_the_answer_was_made(rig: Rig) -> None:
    workers, _, client = await two_workers(rig)
    text = "a question of some length"
    for _ in range(4):
        answer = await client.ask(text, sampling={"max_tokens": 40})
        text += answer.text + "and a question more"
        assert (await client.ask("something else", sampling={"max_tokens": 1})).error is None
    assert sorted(sum("question" in prompt for prompt in prompts(worker)) for worker in workers) == [0, 4]


async def test_a_prefix_that_everybody_has_loads_no_worker_much_more(rig: Rig) -> None:
    workers, _, client = await two_workers(rig)
    for worker in workers:
        worker.is_silent = True  # nothing ends, so what a worker has taken is its load
    hot = "the same long beginning of every single prompt, whoever asks whatever "
    asked = [asyncio.create_task(client.ask(f"{hot}{number}", timeout=60)) for number in range(16)]
    await eventually(lambda: sum(len(worker.running) for worker in workers) >= 10)
    for worker in workers:
        worker.is_silent = False
    assert [(await it).error for it in asked] == [None] * 16
    assert min(len(worker.submitted) for worker in workers) >= 3


async def test_a_worker_that_one_gateway_does_not_reach_gets_nothing_of_it(rig: Rig) -> None:
    first = await rig.worker(worker_id="w1", max_num_seqs=1, step_s=None)
    second = await rig.worker(worker_id="w2", max_num_seqs=8)
    app, client = await rig.serving(first, second)
    await eventually(lambda: app.fleet.num_ready(MODEL) == 2)
    confined, its_client = await rig.serving(first)
    running = asyncio.create_task(its_client.ask("runs", sampling={"max_tokens": 1}))
    await first.wait_for(lambda: len(first.running) == 1)
    waiting = asyncio.create_task(its_client.ask("waits", sampling={"max_tokens": 1}))
    await eventually(lambda: len(confined.dispatcher.live) == 2)
    for number in range(5):  # each of these is a reason to look at the one that waits
        assert (await client.ask(f"other {number}", sampling={"max_tokens": 2})).error is None
    assert not any(
        live.last_attempt for live in confined.dispatcher.live if live.request.prompt_token_ids == tuple(b"waits")
    )
    assert len(second.submitted) == 5
    await first.step()
    assert (await running).error is None
    await first.wait_for(lambda: len(first.running) == 1)
    await first.step()
    assert (await waiting).error is None
