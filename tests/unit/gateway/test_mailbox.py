from __future__ import annotations

import asyncio

import pytest

from common.errors import UnavailableError
from common.types import FinishReason, PositionLogprobs, TokenLogprob
from gateway.lifecycle import failed, gone
from gateway.mailbox import Mailbox


async def test_what_arrives_meanwhile_is_one_delivery() -> None:
    mailbox = Mailbox()
    position = PositionLogprobs(TokenLogprob(2, -1.0))
    mailbox.put_tokens([1], [], None)
    mailbox.put_tokens([2, 3], [position], None)
    mailbox.put_tokens([], [], FinishReason.STOP)
    assert mailbox.num_unread_tokens == 3
    delivery = await mailbox.take()
    assert (delivery.token_ids, delivery.logprobs, delivery.finish_reason) == ([1, 2, 3], [position], FinishReason.STOP)
    assert mailbox.num_unread_tokens == 0


async def test_a_waiting_reader_is_woken() -> None:
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put_tokens([1], [], None)
    mailbox.put_tokens([2], [], None)  # before the reader runs
    assert (await reader).token_ids == [1, 2]


async def test_a_cancelled_reader_loses_nothing() -> None:
    mailbox = Mailbox()
    reader = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put_tokens([1], [], None)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert (await mailbox.take()).token_ids == [1]


async def test_the_first_end_stays_and_keeps_the_tokens_before_it() -> None:
    mailbox = Mailbox()
    first = failed(UnavailableError("first"))
    mailbox.put_tokens([1], [], None)
    mailbox.put_end(first)
    mailbox.put_end(gone())
    delivery = await mailbox.take()
    assert (delivery.token_ids, delivery.end) == ([1], first)


async def test_while_the_reader_waits_tokens_go_to_the_tap_and_the_last_ones_to_the_reader() -> None:
    mailbox, tapped = Mailbox(), list[int]()
    reader = asyncio.create_task(mailbox.take(lambda token_ids, _: tapped.extend(token_ids) or True))
    await asyncio.sleep(0)
    mailbox.put_tokens([1], [], None)
    mailbox.put_tokens([2, 3], [], None)
    await asyncio.sleep(0)
    assert not reader.done()
    assert mailbox.num_unread_tokens == 0
    mailbox.put_tokens([4], [], FinishReason.LENGTH)
    delivery = await reader
    assert (tapped, delivery.token_ids, delivery.finish_reason) == ([1, 2, 3], [4], FinishReason.LENGTH)
    mailbox.put_tokens([5], [], None)  # nobody waits: not for a tap of former times
    assert tapped == [1, 2, 3]


async def test_what_a_tap_cannot_take_and_all_that_follows_wait_for_the_reader() -> None:
    mailbox, tapped = Mailbox(), list[int]()
    reader = asyncio.create_task(mailbox.take(lambda token_ids, _: token_ids != [2] and not tapped.extend(token_ids)))
    await asyncio.sleep(0)
    for token_id in (1, 2, 3):
        mailbox.put_tokens([token_id], [], None)
    assert (tapped, (await reader).token_ids) == ([1], [2, 3])


async def test_tokens_behind_an_end_do_not_overtake_it() -> None:
    mailbox, tapped = Mailbox(), list[int]()
    reader = asyncio.create_task(mailbox.take(lambda token_ids, _: tapped.extend(token_ids) or True))
    await asyncio.sleep(0)
    mailbox.put_end(gone())
    mailbox.put_tokens([1], [], None)
    delivery = await reader
    assert (tapped, delivery.token_ids, delivery.end) == ([], [1], gone())
