from __future__ import annotations

import asyncio
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.inference.v1 import types_pb2, worker_pb2
from worker.rpc.mailbox import MAX_POSITIONS, MAX_REQUESTS, Mailbox


def output(request_id: str, tokens: range | list[int], *, finish: int = 0, cached: int = 0) -> worker_pb2.RequestOutput:
    return worker_pb2.RequestOutput(
        request_id=request_id,
        attempt=1,
        token_ids=tokens,
        logprobs=[types_pb2.PositionLogprobs(sampled=types_pb2.TokenLogprob(token_id=token)) for token in tokens],
        finish_reason=finish,  # type: ignore[arg-type]
        cached_prompt_tokens=cached,
    )


async def test_news_of_several_steps_merge_while_nobody_takes_them() -> None:
    mailbox = Mailbox()
    mailbox.put_outputs([output("a", [1], cached=16), output("b", [7])])
    mailbox.put_outputs([output("a", [2, 3], finish=types_pb2.FINISH_REASON_STOP)])
    step = (await mailbox.take()).step
    assert [(each.request_id, list(each.token_ids)) for each in step.outputs] == [("a", [1, 2, 3]), ("b", [7])]
    first = step.outputs[0]
    assert (first.finish_reason, first.cached_prompt_tokens, len(first.logprobs)) == (1, 16, 3)


async def test_new_numbers_replace_old_ones_and_keep_their_claims() -> None:
    mailbox = Mailbox()
    claims = [worker_pb2.ClaimRef(request_id=name, attempt=1) for name in ("a", "b")]
    mailbox.put_usage(worker_pb2.BlockUsage(seq=1, empty=9, running=1, accounted=claims[:1]))
    mailbox.put_usage(worker_pb2.BlockUsage(seq=2, empty=0, running=0, accounted=claims[1:]))
    usage = (await mailbox.take()).step.usage
    assert (usage.seq, usage.empty, usage.running) == (2, 0, 0)
    assert {claim.request_id for claim in usage.accounted} == {"a", "b"}


async def test_goodbye_comes_after_everything_else() -> None:
    mailbox = Mailbox()
    mailbox.put_goodbye(types_pb2.REASON_DRAINING)
    mailbox.put_rejected(worker_pb2.Rejected(request_id="r"))
    mailbox.put_outputs([output("a", [1])])
    kinds = [(await mailbox.take()).WhichOneof("event") for _ in range(3)]
    assert kinds == ["step", "rejected", "goodbye"]


async def test_a_request_is_handed_back_after_all_its_tokens() -> None:
    mailbox = Mailbox()
    mailbox.put_outputs([output("a", list(range(MAX_POSITIONS + 1)))])
    mailbox.put_handed_back(worker_pb2.HandedBack(request_id="a", attempt=1))
    mailbox.put_goodbye(types_pb2.REASON_DRAINING)
    events = [await mailbox.take() for _ in range(4)]
    assert [event.WhichOneof("event") for event in events] == ["step", "step", "handed_back", "goodbye"]
    assert events[2].handed_back.request_id == "a"


async def test_take_waits_for_news() -> None:
    mailbox = Mailbox()
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put_outputs([output("a", [1])])
    assert (await taking).step.outputs[0].token_ids == [1]


async def test_a_message_holds_no_more_than_its_bound() -> None:
    mailbox = Mailbox()
    mailbox.put_outputs([output("a", range(MAX_POSITIONS + 10), finish=types_pb2.FINISH_REASON_LENGTH, cached=3)])
    first, second = (await mailbox.take()).step, (await mailbox.take()).step
    assert len(first.outputs[0].token_ids) == MAX_POSITIONS
    assert (first.outputs[0].finish_reason, first.outputs[0].cached_prompt_tokens) == (0, 3)
    assert list(second.outputs[0].token_ids) == list(range(MAX_POSITIONS, MAX_POSITIONS + 10))
    assert (second.outputs[0].finish_reason, second.outputs[0].cached_prompt_tokens) == (2, 0)


async def test_room_ends_when_too_many_requests_have_news() -> None:
    mailbox = Mailbox()
    for index in range(MAX_REQUESTS):
        await asyncio.wait_for(mailbox.room(), 120)
        mailbox.put_rejected(worker_pb2.Rejected(request_id=str(index)))
    waiting = asyncio.create_task(mailbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await mailbox.take()
    await asyncio.wait_for(waiting, 120)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.just(None), st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 99), min_size=1, max_size=9000))
        ),
        max_size=12,
    )
)
def test_no_token_is_lost_or_reordered_however_takes_and_puts_mix(
    actions: list[tuple[str, list[int]] | None],
) -> None:
    async def run() -> None:
        mailbox, put, got = Mailbox(), defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)

        async def take() -> None:
            step = (await asyncio.wait_for(mailbox.take(), 120)).step
            assert sum(len(each.token_ids) for each in step.outputs) <= MAX_POSITIONS
            for each in step.outputs:
                assert len(each.token_ids) == len(each.logprobs) or not each.logprobs
                got[each.request_id].extend(each.token_ids)

        for action in actions:
            if action is None:
                if got != put:
                    await take()
            else:
                put[action[0]].extend(action[1])
                mailbox.put_outputs([worker_pb2.RequestOutput(request_id=action[0], attempt=1, token_ids=action[1])])
        while got != put:
            await take()

    asyncio.run(run())
