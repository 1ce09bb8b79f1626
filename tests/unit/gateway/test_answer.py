from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TidegateError, UnavailableError
from common.types import FinishReason, PositionLogprobs, TokenLogprob
from gateway.answer import Answer, TextDelta
from gateway.lifecycle import failed, finished
from gateway.mailbox import Delivery
from tests.unit.gateway.fakes import live_request


class Outlet:
    """Keeps the text that it takes."""

    def __init__(self) -> None:
        self.is_free = True
        self.sent: list[TextDelta] = []

    def send(self, delta: TextDelta) -> None:
        assert self.is_free
        self.sent.append(delta)

    def on_stuck(self, error: TidegateError) -> None:
        raise AssertionError("nobody is stuck here") from error


TEXT = "naïve 🙂 text, then END and more"


@given(st.lists(st.integers(0, len(TEXT.encode())), max_size=6))
def test_the_text_does_not_depend_on_how_tokens_arrive(cuts: list[int]) -> None:
    raw = TEXT.encode()
    answer = Answer(live_request(stop=("END",)))
    texts, ids, outcome = [], [], None
    bounds = [0, *sorted(cuts), len(raw)]
    for start, stop in itertools.pairwise(bounds):
        positions = [PositionLogprobs(TokenLogprob(it, -1.0)) for it in raw[start:stop]]
        deltas, outcome = answer.take(Delivery(list(raw[start:stop]), positions))
        for delta in deltas:
            texts.append(delta.text)
            ids += delta.token_ids
            assert len(delta.logprobs) == len(delta.token_ids)
        if outcome is not None:
            break
    expected = TEXT.encode().partition(b"END")
    assert outcome == finished(FinishReason.STOP)
    assert "".join(texts) == expected[0].decode()
    assert bytes(ids) == expected[0] + expected[1]
    assert answer.num_completion_tokens == len(ids)


def test_the_workers_reason_ends_it_with_what_was_held_back() -> None:
    answer = Answer(live_request(stop=("END",)))
    deltas, outcome = answer.take(Delivery(list(b"the EN"), finish_reason=FinishReason.LENGTH))
    assert "".join(delta.text for delta in deltas) == "the EN"
    assert outcome == finished(FinishReason.LENGTH)
    assert answer.finish(outcome, 3.0).usage.completion_tokens == 6


def test_a_stop_string_in_the_last_tokens_wins_over_the_length() -> None:
    answer = Answer(live_request(stop=("END",)))
    _, outcome = answer.take(Delivery(list(b"the END"), finish_reason=FinishReason.LENGTH))
    assert outcome == finished(FinishReason.STOP)


def test_an_end_from_outside_comes_after_the_tokens_before_it() -> None:
    error = failed(UnavailableError("lost"))
    [delta], outcome = Answer(live_request()).take(Delivery(list(b"abc"), end=error))
    assert (delta.text, outcome) == ("abc", error)


def test_an_error_is_no_normal_end() -> None:
    with pytest.raises(ValueError, match="normal end"):
        Answer(live_request()).finish(failed(UnavailableError("lost")), 0.0)


def test_what_merged_for_long_is_sent_in_pieces_that_fit_a_message() -> None:
    answer = Answer(live_request(stop=("END",)))
    raw = [97] * 5000 + list(b"END") + [98] * 5000
    deltas, outcome = answer.take(Delivery(raw, [PositionLogprobs(TokenLogprob(it, -1.0)) for it in raw]))
    assert outcome == finished(FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == "a" * 5000
    assert [len(delta.token_ids) for delta in deltas] == [2048, 2048, 907]
    assert [len(delta.logprobs) for delta in deltas] == [2048, 2048, 907]


@given(st.lists(st.tuples(st.integers(0, len(TEXT.encode())), st.booleans()), max_size=6))
def test_the_text_does_not_depend_on_what_is_poured_and_what_is_taken(cuts: list[tuple[int, bool]]) -> None:
    raw = TEXT.encode()
    answer, outlet = Answer(live_request(stop=("END",))), Outlet()
    bounds = sorted([*cuts, (len(raw), True)])
    begin, outcome = 0, None
    for end, outlet.is_free in bounds:
        if answer.pour(list(raw[begin:end]), [], outlet):
            assert outlet.is_free
            outcome = finished(FinishReason.STOP) if answer.is_stopped else None
        else:
            assert not outlet.is_free
            deltas, outcome = answer.take(Delivery(list(raw[begin:end])))
            outlet.sent.extend(deltas)
        begin = end
        if outcome is not None:
            break
    assert outcome == finished(FinishReason.STOP)
    assert "".join(delta.text for delta in outlet.sent) == TEXT.partition("END")[0]
    assert [delta.offset for delta in outlet.sent] == sorted({delta.offset for delta in outlet.sent})


def test_tokens_that_the_client_knows_are_not_poured() -> None:
    answer, outlet = Answer(live_request(), offset=3), Outlet()
    assert not answer.pour(list(b"ab"), [], outlet)
    answer.take(Delivery(list(b"ab")))
    assert not answer.pour(list(b"cd"), [], outlet), "one of them is known"
    [delta], _ = answer.take(Delivery(list(b"cd")))
    assert delta.text == "d"
    assert answer.pour(list(b"ef"), [], outlet)
    assert [(it.text, it.offset) for it in outlet.sent] == [("ef", 6)]


def test_an_unfinished_character_is_not_sent_before_it_is_whole() -> None:
    answer, outlet = Answer(live_request()), Outlet()
    for byte in "🙂".encode():
        assert answer.pour([byte], [], outlet)
    assert "".join(delta.text for delta in outlet.sent) == "🙂"
