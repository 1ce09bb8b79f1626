"""What is remembered of requests that ended with an error."""

from __future__ import annotations

import asyncio

import pytest

from common.clock import SystemClock
from common.errors import LimitExceededError, TidegateError
from common.types import Reason
from gateway.rpc.endings import Endings, WatchedCall


def refuse(call: WatchedCall, late_id: str, error: TidegateError | None) -> None:
    call.fleet_id = late_id or call.fleet_id
    raise error or LimitExceededError("full")


def fail(endings: Endings, fleet_id: str, error: TidegateError | None = None, late_id: str = "") -> None:
    call = WatchedCall("acme", fleet_id)
    with pytest.raises(TidegateError), endings.noted(call):
        refuse(call, late_id, error)


def test_the_last_so_many_are_kept_and_the_latest_of_an_id_counts() -> None:
    endings = Endings(SystemClock(), max_kept=2)
    fail(endings, "acme/1")
    fail(endings, "acme/2")
    later = LimitExceededError("again")
    fail(endings, "acme/1", later)
    fail(endings, "acme/3")
    assert len(endings) == 2
    assert endings.find("acme/2") is None
    found = endings.find("acme/1")
    assert found is not None
    assert (found.message, found.status) == ("again", later.status)


def test_a_good_end_forgets_an_earlier_bad_one() -> None:
    endings = Endings(SystemClock())
    fail(endings, "acme/1")
    with endings.noted(WatchedCall("acme", "acme/1")):
        pass
    assert endings.find("acme/1") is None


def test_the_id_may_come_later_and_who_has_none_or_a_monstrous_one_is_only_listed() -> None:
    endings = Endings(SystemClock())
    fail(endings, "", late_id="acme/late")
    assert endings.find("acme/late") is not None
    fail(endings, "")
    fail(endings, "acme/" + "x" * 4_000_000, LimitExceededError("y" * 4_000_000))
    assert [len(it.request_id) for it in endings.latest("acme", 10)] == [0, 0, 4]
    assert len(endings.latest("acme", 1)[0].message) == 1000
    assert endings.latest("bolt", 10) == []


async def test_a_client_that_hangs_up_at_its_deadline_has_reached_it() -> None:
    clock = SystemClock()
    endings = Endings(clock)
    for number, left_s in enumerate((0.0, 3600.0)):
        call = WatchedCall("acme", f"acme/{number}", clock.monotonic() + left_s)
        with pytest.raises(asyncio.CancelledError), endings.noted(call):
            raise asyncio.CancelledError
    found = endings.find("acme/0")
    assert found is not None
    assert found.reason is Reason.DEADLINE
    assert endings.find("acme/1") is None


def test_others_are_told_the_latest_and_what_could_not_be_told_goes_before_what_came_since() -> None:
    endings = Endings(SystemClock())
    for number in range(1500):
        fail(endings, f"acme/{number}")
    untold = endings.take_untold()
    assert list(untold)[::999] == ["acme/500", "acme/1499"]
    assert endings.take_untold() == {}
    with endings.noted(WatchedCall("acme", "acme/1499")):
        pass
    fail(endings, "", late_id="acme/late")
    endings.give_back(untold)
    told = endings.take_untold()
    assert len(told) == 1000
    assert told["acme/1499"] is None, "it has ended well since"
    assert told["acme/late"] is not None
