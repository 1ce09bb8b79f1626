"""The waiting list: always by arrival, wherever requests come from or go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import Band, SamplingParams
from worker.engine.request import Request
from worker.engine.waiting import WaitingList


def make_request(arrival: int, num_preemptions: int = 0) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=1)
    return Request("r", 1, 1, [1], 1, sampling, Band.NORMAL, "", arrival, num_preemptions=num_preemptions)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 30)), max_size=40))
def test_it_is_by_arrival_after_any_adding_and_removing(steps: list[tuple[bool, int]]) -> None:
    waiting, here, away, last = WaitingList(), dict[int, Request](), list[Request](), 0
    for comes, draw in steps:
        if comes and away and draw % 2:  # somebody comes back
            request = away.pop(draw % len(away))
            request.num_preemptions += 1
        elif comes:
            last += 1
            request = make_request(last)
        elif here:
            request = here.pop(sorted(here)[draw % len(here)])
            waiting.remove(request)
            away.append(request)
            continue
        else:
            continue
        waiting.add(request)
        here[request.arrival] = request
        in_order = [here[arrival] for arrival in sorted(here)]
        assert list(waiting) == in_order
        assert waiting.first(3) == in_order[:3]
        assert len(waiting) == len(here)
        assert waiting.num_returning == sum(request.num_preemptions > 0 for request in in_order)


def test_a_fresh_request_that_came_earlier_than_another_is_a_mistake() -> None:
    waiting = WaitingList()
    waiting.add(make_request(2))
    for arrival in (1, 2):
        with pytest.raises(ValueError, match="arrived before another"):
            waiting.add(make_request(arrival))


@pytest.mark.parametrize("num_preemptions", [0, 1])
def test_removing_who_is_not_here_is_a_mistake(num_preemptions: int) -> None:
    waiting = WaitingList()
    waiting.add(make_request(1, num_preemptions))
    with pytest.raises(KeyError):
        waiting.remove(make_request(2, num_preemptions))
