from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UnavailableError
from common.types import FinishReason, PositionLogprobs, TokenLogprob
from gateway.answer import Answer
from gateway.lifecycle import failed, finished
from gateway.mailbox import Delivery
from tests.unit.gateway.fakes import live_request

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
