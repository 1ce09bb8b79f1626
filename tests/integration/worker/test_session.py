from __future__ import annotations

import asyncio

import grpc
import pytest

from protos.inference.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.integration.worker.rig import IDENTITY, WAIT_S, Gateway, WorkerRig, end_of, until
from tests.support.fake_executor import generate
from worker.engine.executor import ExecutionError

PROMPT = [1, 2, 3, 4, 5]


async def test_a_request_streams_and_its_claim_is_accounted_for_once() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        opened = await gateway.open()
        assert (opened.worker_id, opened.epoch, opened.limits.num_blocks) == (IDENTITY.worker_id, IDENTITY.epoch, 64)
        await gateway.submit("acme/1", PROMPT, max_tokens=9)
        assert await gateway.read_until_ended("acme/1") == "FINISH_REASON_LENGTH"
        assert gateway.tokens["acme/1", 1] == generate(PROMPT, 9, vocab_size=1000)
        while gateway.usage.referenced or not gateway.accounted:
            await gateway.read()
        assert gateway.accounted == [("acme/1", 1)]
        usage = gateway.usage
        assert usage.empty + usage.cached + usage.referenced + usage.swapping == 64
        assert usage.free_slots > 0


async def test_commands_of_one_message_are_obeyed_in_their_order() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        await gateway.submit("acme/0", PROMPT)
        await until(lambda: rig.loop.age_s > 0)  # in a step, so that all that comes meanwhile is taken together
        sampling = types_pb2.SamplingParams(max_tokens=9)

        def submit(request_id: str) -> worker_pb2.SessionCommand:
            message = worker_pb2.Submit(
                request_id=request_id, attempt=1, prompt_token_ids=PROMPT, sampling=sampling, band=types_pb2.BAND_NORMAL
            )
            return worker_pb2.SessionCommand(submit=message)

        command = submit("acme/1")
        abort = worker_pb2.SessionCommand(abort=worker_pb2.Abort(request_id="acme/2", attempt=1))
        command.more.extend([submit("acme/2"), abort, submit("acme/3")])
        await gateway.call.write(command)
        await gateway.until_heard()
        rig.executor.gate.set()
        for request_id in ("acme/1", "acme/3"):
            assert await gateway.read_until_ended(request_id) == "FINISH_REASON_LENGTH"
        assert not gateway.tokens.get(("acme/2", 1))
        gateway.call.cancel()
        await rig.until_idle()


async def test_output_of_earlier_attempts_is_context_and_not_sent_again() -> None:
    whole = generate(PROMPT, 9, vocab_size=1000)
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        await gateway.submit("acme/1", PROMPT, max_tokens=9, attempt=2, output_token_ids=whole[:4])
        await gateway.read_until_ended("acme/1", 2)
        assert gateway.tokens["acme/1", 2] == whole[4:]


@pytest.mark.parametrize("end", ["half-close", "cancel", "channel"])
async def test_every_end_of_a_session_aborts_its_requests_and_no_others(end: str) -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        other = Gateway(channel)
        await other.open("g2")
        lost_channel = grpc.aio.insecure_channel(rig.address, options=[("grpc.use_local_subchannel_pool", 1)])
        gateway = Gateway(lost_channel)
        await gateway.open()
        rig.executor.gate.clear()
        for index in range(8):  # more than run at once
            await gateway.submit(f"acme/{index}", PROMPT, max_tokens=400)
        await other.submit("beta/1", PROMPT, max_tokens=3)
        if end == "half-close":
            await gateway.call.done_writing()
        elif end == "cancel":
            gateway.call.cancel()
        else:
            await lost_channel.close()
        await until(lambda: rig.num_sessions == 1)
        rig.executor.gate.set()
        assert await other.read_until_ended("beta/1") == "FINISH_REASON_LENGTH"
        while other.usage.referenced or other.usage.waiting:
            await other.read()
        assert ("acme/0", 1) not in other.tokens
        await lost_channel.close()


async def test_a_paused_request_makes_nothing_until_it_is_resumed() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        await gateway.submit("acme/1", PROMPT, max_tokens=9)
        await gateway.pause("acme/1")
        await gateway.pause("acme/1", attempt=7)
        await gateway.submit("acme/2", PROMPT, max_tokens=90)
        await gateway.until_heard()
        rig.executor.gate.set()
        assert await gateway.read_until_ended("acme/2") == "FINISH_REASON_LENGTH"
        assert len(gateway.tokens.get(("acme/1", 1), [])) <= 1, "one step may have begun before the pause"
        await until(lambda: rig.loop.age_s == 0 and rig.engine.num_requests == 1)
        await gateway.resume("acme/1", attempt=7)
        await gateway.resume("acme/1")
        assert await gateway.read_until_ended("acme/1") == "FINISH_REASON_LENGTH"
        assert gateway.tokens["acme/1", 1] == generate(PROMPT, 9, vocab_size=1000)


async def test_a_paused_request_ends_with_its_abort_or_its_session() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        for name in ("acme/1", "acme/2"):
            await gateway.submit(name, PROMPT, max_tokens=400)
            await gateway.pause(name)
        await gateway.abort("acme/1")
        await gateway.until_heard()
        rig.executor.gate.set()
        assert await gateway.read_until_ended("acme/1") == "FINISH_REASON_CANCELLED"
        gateway.call.cancel()
        await rig.until_idle()


async def test_what_has_passed_its_clients_deadline_is_ended_with_the_next_step() -> None:
    async with WorkerRig(has_clock=True).running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        await gateway.submit("acme/1", PROMPT, max_tokens=400, timeout_s=0.2)
        await gateway.submit("acme/2", PROMPT, max_tokens=4, timeout_s=1000.0)
        await until(lambda: rig.loop.age_s > 0.3)
        rig.executor.gate.set()
        assert await gateway.read_until_ended("acme/1") == "REASON_DEADLINE"
        assert await gateway.read_until_ended("acme/2") == "FINISH_REASON_LENGTH"


async def test_an_abort_ends_one_attempt_of_one_request() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        await gateway.submit("acme/1", PROMPT, max_tokens=400)
        await gateway.submit("acme/2", PROMPT, max_tokens=2)
        await gateway.abort("acme/2", attempt=7)
        await gateway.abort("acme/3")
        await gateway.abort("acme/1")
        await gateway.until_heard()
        rig.executor.gate.set()
        assert await gateway.read_until_ended("acme/1") == "FINISH_REASON_CANCELLED"
        assert await gateway.read_until_ended("acme/2") == "FINISH_REASON_LENGTH"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": []}, "REASON_EMPTY_PROMPT"),
        ({"prompt_token_ids": [1, 1000]}, "REASON_INVALID_TOKEN_ID"),
        ({"prompt_token_ids": [2**32 - 1]}, "REASON_INVALID_TOKEN_ID"),
        ({"prompt_token_ids": [1] * 512}, "REASON_PROMPT_TOO_LONG"),
        ({"prompt_token_ids": [1] * 300}, "REASON_NEVER_FITS"),
        ({"attempt": 0}, "REASON_INVALID_PARAMETER"),
        ({"band": 77}, "REASON_INVALID_PARAMETER"),
        ({"sampling": types_pb2.SamplingParams(temperature=float("nan"))}, "REASON_INVALID_PARAMETER"),
        ({"sampling": types_pb2.SamplingParams(max_tokens=0)}, "REASON_INVALID_PARAMETER"),
    ],
)
async def test_garbage_is_rejected_with_its_reason_and_the_next_request_runs(
    fields: dict[str, object], reason: str
) -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        await gateway.submit("acme/1", PROMPT, **fields)
        assert await gateway.read_until_ended("acme/1", int(fields.get("attempt", 1))) == reason  # type: ignore[call-overload]
        await gateway.submit("acme/2", PROMPT)
        assert await gateway.read_until_ended("acme/2") == "FINISH_REASON_LENGTH"


async def test_the_same_attempt_twice_is_refused_and_the_first_goes_on() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        await gateway.submit("acme/1", PROMPT)
        await gateway.submit("acme/1", PROMPT)
        while True:
            event = await gateway.call.read()
            if event.HasField("rejected"):
                break
        assert event.rejected.reason == types_pb2.REASON_DUPLICATE_REQUEST_ID
        rig.executor.gate.set()
        assert await gateway.read_until_ended("acme/1") == "FINISH_REASON_LENGTH"


async def test_more_than_the_worker_takes_is_answered_with_no_credit() -> None:
    async with WorkerRig(max_num_seqs=1).running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.gate.clear()
        for index in range(40):
            await gateway.submit(f"acme/{index}", PROMPT, max_tokens=2)
        await gateway.until_heard()
        rig.executor.gate.set()
        ends = [await gateway.read_until_ended(f"acme/{index}") for index in range(40)]
        assert set(ends) == {"FINISH_REASON_LENGTH", "REASON_NO_CREDIT"}


@pytest.mark.parametrize(
    "commands",
    [
        [],
        [worker_pb2.SessionCommand()],
        [worker_pb2.SessionCommand(abort=worker_pb2.Abort(request_id="x"))],
        [worker_pb2.SessionCommand(open=worker_pb2.Open())],
        [worker_pb2.SessionCommand(open=worker_pb2.Open(gateway_id="g"))] * 2,
        [worker_pb2.SessionCommand(open=worker_pb2.Open(gateway_id="g")), worker_pb2.SessionCommand()],
        [
            worker_pb2.SessionCommand(open=worker_pb2.Open(gateway_id="g")),
            worker_pb2.SessionCommand(abort=worker_pb2.Abort(request_id="x"), more=[worker_pb2.SessionCommand()]),
        ],
    ],
)
async def test_what_is_no_conversation_ends_as_invalid(commands: list[worker_pb2.SessionCommand]) -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Session(timeout=WAIT_S)
        for command in commands:
            await call.write(command)
        if not commands:
            await call.done_writing()
        assert await end_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        await rig.until_idle()


async def test_undecodable_bytes_end_the_session_as_invalid() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        call = channel.stream_stream("/inference.v1.Worker/Session")(timeout=WAIT_S)
        await call.write(worker_pb2.SessionCommand(open=worker_pb2.Open(gateway_id="g")).SerializeToString())
        await call.write(b"\xff\xff\xff")
        assert await end_of(call) is grpc.StatusCode.INVALID_ARGUMENT
        await rig.until_idle()


async def test_a_silent_session_gets_heartbeats_that_show_a_hanging_step() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        first = await gateway.read()
        heartbeat = await gateway.read()
        assert first is not None
        assert heartbeat is not None
        assert heartbeat.step.HasField("usage")
        assert (heartbeat.step.usage.seq, heartbeat.step.loop_age_s) == (first.step.usage.seq, 0)
        rig.executor.gate.clear()
        await gateway.submit("acme/1", PROMPT)
        ages = []
        while len(ages) < 3 or ages[-1] <= ages[-2]:
            event = await gateway.read()
            assert event is not None
            ages.append(event.step.loop_age_s)
        rig.executor.gate.set()
        await gateway.read_until_ended("acme/1")


async def test_a_session_that_reads_late_misses_nothing() -> None:
    async with WorkerRig(num_blocks=512).running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        for index in range(4):
            await gateway.submit(f"acme/{index}", [index + 1], max_tokens=400)
        await until(lambda: len(rig.executor.batches) >= 400 and not rig.engine.num_requests)
        for index in range(4):
            await gateway.read_until_ended(f"acme/{index}")
            assert gateway.tokens[f"acme/{index}", 1] == generate([index + 1], 400, vocab_size=1000)


async def test_drain_finishes_what_runs_refuses_the_rest_and_says_goodbye() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        busy, idle = Gateway(channel), Gateway(channel)
        await busy.open("g1")
        await idle.open("g2")
        rig.executor.gate.clear()
        await busy.submit("acme/1", PROMPT, max_tokens=30)
        await until(lambda: rig.engine.num_requests == 1)
        draining = asyncio.gather(rig.loop.drain(), rig.service.drain())
        while (event := await idle.read()) is not None and not event.HasField("goodbye"):
            pass
        assert event is not None
        assert event.goodbye.reason == types_pb2.REASON_DRAINING
        await busy.submit("acme/2", PROMPT)
        assert await busy.read_until_ended("acme/2") == "REASON_DRAINING"
        rig.executor.gate.set()
        assert await busy.read_until_ended("acme/1") == "FINISH_REASON_LENGTH"
        assert len(busy.tokens["acme/1", 1]) == 30
        while (event := await busy.read()) is not None:
            last = event
        assert last.HasField("goodbye")
        assert await end_of(busy.call) is grpc.StatusCode.OK
        await asyncio.wait_for(draining, WAIT_S)
        late = worker_pb2_grpc.WorkerStub(channel).Session(timeout=WAIT_S)
        assert await end_of(late) is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_that_has_lasted_long_enough_hands_back_what_runs() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open("g1")
        rig.executor.gate.clear()
        await gateway.submit("acme/1", PROMPT, max_tokens=30)
        await until(lambda: rig.engine.num_requests == 1)
        draining = asyncio.create_task(rig.service.drain())
        await asyncio.wait_for(rig.service.hand_back(), WAIT_S)
        while (event := await gateway.read()) is not None:
            last = event
        assert last.goodbye.reason == types_pb2.REASON_DRAINING
        assert await end_of(gateway.call) is grpc.StatusCode.OK
        await asyncio.wait_for(draining, WAIT_S)
        rig.executor.gate.set()
        await until(lambda: not rig.engine.num_requests)


async def test_a_gateway_can_drain_its_own_session() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway, other = Gateway(channel), Gateway(channel)
        await gateway.open("g1")
        await other.open("g2")
        await gateway.call.write(worker_pb2.SessionCommand(drain=worker_pb2.Drain()))
        while (event := await gateway.read()) is not None:
            last = event
        assert last.HasField("goodbye")
        await other.submit("beta/1", PROMPT)
        assert await other.read_until_ended("beta/1") == "FINISH_REASON_LENGTH"


async def test_a_gateway_can_ask_the_whole_worker_to_drain() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open("g1")
        await gateway.call.write(worker_pb2.SessionCommand(drain=worker_pb2.Drain(whole_worker=True)))
        await asyncio.wait_for(rig.drain_wanted.wait(), WAIT_S)


async def test_a_dead_engine_ends_sessions_as_unavailable_and_takes_no_new_ones() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.error = ZeroDivisionError("broken")
        await gateway.submit("acme/1", PROMPT)
        assert await end_of(gateway.call) is grpc.StatusCode.UNAVAILABLE
        assert isinstance(rig.loop.dead, ZeroDivisionError)
        late = worker_pb2_grpc.WorkerStub(channel).Session(timeout=WAIT_S)
        assert await end_of(late) is grpc.StatusCode.UNAVAILABLE


async def test_a_failed_step_ends_its_requests_and_the_worker_lives() -> None:
    async with WorkerRig().running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        gateway = Gateway(channel)
        await gateway.open()
        rig.executor.error = ExecutionError("out of luck")
        await gateway.submit("acme/1", PROMPT)
        assert await gateway.read_until_ended("acme/1") == "REASON_INTERNAL"
        await gateway.submit("acme/2", PROMPT)
        assert await gateway.read_until_ended("acme/2") == "FINISH_REASON_LENGTH"
