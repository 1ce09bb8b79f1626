"""What counts against a share, and which answers of the store change it."""

from __future__ import annotations

import pytest

from gateway.admission.limits import NO_LIMITS, Remaining, TenantLimits
from gateway.admission.recent import RecentUse
from gateway.admission.shares import NOTHING, WINDOW_S, Amounts, Share, UseState

LIMITS = TenantLimits(requests_per_minute=100, tokens_per_minute=1000, max_concurrent=50, tokens_per_day=10_000)
PLENTY = Amounts(50, 500, 50, 5000)


def share_of(amounts: Amounts, until: float = 1000.0) -> Share:
    share = Share()
    number, _, _ = share.begin_call(0.0)
    assert share.granted(number, amounts, until) == []
    return share


@pytest.mark.parametrize(
    "amounts",
    [Amounts(2, 500, 50, 5000), Amounts(50, 29, 50, 5000), Amounts(50, 500, 2, 5000), Amounts(50, 500, 50, 29)],
)
def test_each_limit_alone_ends_it(amounts: Amounts) -> None:
    share = share_of(amounts)
    assert [share.admit(f"r{i}", 10, LIMITS, 1.0) is not None for i in range(4)] == [True, True, False, False]


def test_what_the_tenant_is_not_limited_in_needs_no_share() -> None:
    share = Share()
    assert share.admit("r1", 10**9, NO_LIMITS, 1.0) == Remaining()
    assert share.admit("r2", 1, TenantLimits(max_concurrent=5), 1.0) is None
    assert share_of(Amounts(concurrent=2)).admit("r1", 10**9, TenantLimits(max_concurrent=5), 1.0) == Remaining(
        concurrent=1
    )


def test_a_minute_later_the_rates_are_free_again_and_day_and_slots_are_not() -> None:
    share = share_of(Amounts(2, 20, 3, 35))
    assert share.admit("r1", 10, LIMITS, 1.0)
    assert share.admit("r2", 10, LIMITS, 1.0)
    assert share.admit("r3", 10, LIMITS, 60.0) is None
    assert share.admit("r3", 10, LIMITS, 1.0 + WINDOW_S)
    assert share.admit("r4", 1, LIMITS, 500.0) is None, "three run"
    assert share.end("r1", 10)
    assert share.admit("r4", 6, LIMITS, 500.0) is None, "more than the day's share"
    assert share.admit("r4", 5, LIMITS, 500.0)


def test_it_ends_with_its_lease_and_one_id_counts_once() -> None:
    share = share_of(PLENTY, until=10.0)
    assert share.admit("r1", 10, LIMITS, 9.0)
    assert share.admit("r1", 10, LIMITS, 9.0)
    assert share.used(9.0) == Amounts(1, 10, 1, 10)
    assert share.admit("r2", 10, LIMITS, 10.0) is None


def test_what_an_answer_has_charged_counts_no_more_and_what_came_since_does() -> None:
    share = share_of(PLENTY)
    share.admit("charged", 10, LIMITS, 1.0)
    share.admit("ended", 20, LIMITS, 1.0)
    number, kept, told = share.begin_call(2.0)
    assert kept == PLENTY
    assert [use.request_id for use in told] == ["charged", "ended"]
    share.end("ended", 5)  # the store has to hear of it again
    share.admit("since", 40, LIMITS, 2.0)
    assert [use.request_id for use in share.granted(number, Amounts(1, 1, 1, 1), 50.0)] == ["charged"]
    assert share.used(2.0) == Amounts(2, 45, 1, 45)
    assert not share.end("charged", 3), "the store counts it"
    _, kept, told = share.begin_call(3.0)
    assert kept == Amounts(1, 1, 1, 1)
    assert [(use.request_id, use.batch, use.state) for use in told] == [
        ("ended", number, UseState.ENDED),
        ("since", number + 1, UseState.RUNNING),
    ]


def test_answers_that_come_after_a_later_call_are_void() -> None:
    share = share_of(Amounts(5, 50, 5, 50))
    share.admit("r1", 10, LIMITS, 1.0)
    early, _, _ = share.begin_call(1.0)
    later, kept = share.give_back(1.0)
    assert (later, kept, share.held) == (early + 1, Amounts(1, 10, 1, 10), Amounts(1, 10, 1, 10))
    assert share.granted(early, PLENTY, 2000.0) == []
    assert share.held == kept
    assert share.admit("r2", 1, LIMITS, 1.0) is None


def test_a_late_reservation_takes_the_place_of_the_use() -> None:
    share = share_of(PLENTY)
    share.admit("r1", 10, LIMITS, 1.0)
    use = share.forget("r1")
    assert use is not None
    assert (use.tokens, use.state) == (10, UseState.RUNNING)
    assert share.is_settled
    assert share.forget("r1") is None


def test_a_call_tells_so_much_and_keeps_aside_what_it_does_not_tell() -> None:
    share = Share()
    for i in range(2500):
        share.admit(f"r{i}", 2, NO_LIMITS, 1.0)
    _, kept, told = share.begin_call(2.0)
    assert len(told) == 2000
    assert kept == Amounts(500, 1000, 500, 1000)
    assert share.held == NOTHING


def test_recent_use_is_known_by_the_second_for_a_minute_and_by_the_quarter_for_a_day() -> None:
    recent = RecentUse()
    recent.add(10.2, 900_010.2, 1, 30)
    recent.add(10.9, 900_010.9, 1, 50)
    recent.add(10.9, 900_010.9, 0, -20)
    recent.add(95.0, 900_095.0, 1, 7)
    sums = recent.sums(100.0, 900_100.0)
    assert [(use.state, use.at, use.requests, use.tokens) for use in sums] == [
        (UseState.OF_WINDOW, 11.0, 2, 60),
        (UseState.OF_WINDOW, 96.0, 1, 7),
        (UseState.OF_DAY, 100.0, 0, 67),
    ]
    recent.forget_old(100.0, 900_100.0)
    assert [use.requests for use in recent.sums(100.0, 900_100.0)] == [1, 0]
    recent.forget_old(100.0 + 90_000, 900_100.0 + 90_000 + 900)
    assert recent.sums(90_100.0, 990_100.0) == []
