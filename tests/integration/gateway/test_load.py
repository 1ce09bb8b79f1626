"""Many streams at once, and readers that do not keep up."""

from __future__ import annotations

import asyncio

import grpc

from tests.integration.gateway.rig import Rig, generate_request, read, reason_of
from tests.support.scripted_worker import text_of

# A small window makes the network's buffers small, so that a little text fills them.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]


async def test_two_thousand_streams_opened_at_once(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=256, num_blocks=100_000, tokens_per_step=4, step_s=0.02)
    # Patience with the store: on a busy machine so many calls wait for their turn.
    app, client = await rig.serving(worker, store_timeout_s=60)
    prompts = [f"prompt {number}" for number in range(2000)]
    asked = [client.ask(prompt, sampling={"max_tokens": 8}, timeout=240) for prompt in prompts]
    answers = await asyncio.gather(*asked)
    assert [answer.error for answer in answers if answer.error is not None] == []
    assert [answer.text for answer in answers] == [text_of(prompt.encode(), 8) for prompt in prompts]
    async with asyncio.timeout(60):
        await app.dispatcher.wait_idle()
    assert [depth.num_waiting for depth in await app.queue.depths()] == [0, 0, 0]


async def test_a_slow_reader_gets_merged_deltas_and_holds_up_nobody(rig: Rig) -> None:
    num_tokens = 190_000
    worker = await rig.worker(context_length=200_000, num_blocks=100_000, tokens_per_step=64, step_s=0.001)
    app, _ = await rig.serving(worker, max_unread_tokens=num_tokens)
    client = await rig.client(app, options=SMALL_WINDOW)
    call = client.generate(generate_request("slow", sampling={"max_tokens": num_tokens}, return_token_ids=True))
    assert (await anext(aiter(call))).HasField("accepted")
    await worker.wait_for(lambda: bool(worker.submitted) and not worker.running, timeout_s=60)
    [live] = app.dispatcher.live
    assert live.mailbox.num_unread_tokens > num_tokens / 2
    # On the same connection, too.
    assert (await client.ask("fast")).text == text_of(b"fast", 8)
    answer = await read(call)
    assert answer.error is None
    assert answer.text == text_of(b"slow", num_tokens)
    assert max(len(delta.token_ids) for delta in answer.deltas) == 2048


async def test_a_slow_readers_request_is_paused_and_goes_on_when_it_reads(rig: Rig) -> None:
    num_tokens = 20_000
    worker = await rig.worker(context_length=200_000, num_blocks=100_000, tokens_per_step=16, step_s=0.001)
    app, _ = await rig.serving(worker, max_unread_tokens=100)
    client = await rig.client(app, options=SMALL_WINDOW)
    call = client.generate(generate_request("slow", sampling={"max_tokens": num_tokens}, return_token_ids=True))
    assert (await anext(aiter(call))).HasField("accepted")
    await worker.wait_for(lambda: any(it.is_paused for it in worker.running))
    assert (await client.ask("fast")).text == text_of(b"fast", 8)
    answer = await read(call)
    assert answer.error is None
    assert answer.text == text_of(b"slow", num_tokens)
    assert True in worker.pauses
    assert worker.pauses == [True, False] * (len(worker.pauses) // 2), "each pause ends once"
    async with asyncio.timeout(60):
        await app.dispatcher.wait_idle()


async def test_a_reader_that_never_reads_is_let_go(rig: Rig) -> None:
    worker = await rig.worker(context_length=200_000, num_blocks=100_000, tokens_per_step=64, step_s=0.001)
    app, _ = await rig.serving(worker, slow_consumer_s=0.5)
    client = await rig.client(app, options=SMALL_WINDOW)
    call = client.generate(generate_request("slow", sampling={"max_tokens": 190_000}, return_token_ids=True))
    assert (await anext(aiter(call))).HasField("accepted")
    async with asyncio.timeout(60):
        await app.dispatcher.wait_idle()
    await worker.wait_for(lambda: not worker.running)
    assert len(worker.aborted) == 1
    answer = await read(call)
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (grpc.StatusCode.ABORTED, "SLOW_CONSUMER")
