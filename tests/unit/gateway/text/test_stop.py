"""Stop strings: against a naive statement of what they mean."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from gateway.text import TextStream
from gateway.text.stop import StopMatcher
from tests.unit.gateway.text.small_tokenizers import byte_level, chatml_model, token_id

STOPS = st.lists(st.text("ab😀", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The text before the first stop string to become complete (the longest of those), and where that one ends."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return None
    end, length = min(ends)
    return text[: end + length], end


@settings(max_examples=250, deadline=None)
@given(pieces=st.lists(st.text("ab😀c", max_size=4), max_size=12), stops=STOPS)
def test_matcher_equals_naive_search_and_holds_only_a_proper_prefix(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        out += matcher.feed(piece)
        expected = cut(seen, stops)
        assert matcher.matched == (expected is not None)
        if expected is not None:
            assert out == expected[0]
            assert matcher.flush() == ""
            return
        held = max((size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])), default=0)
        assert out == seen[: len(seen) - held]
    assert out + matcher.flush() == seen


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab😀 中", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 60), max_size=6))
def test_stream_stops_at_the_completing_token_however_it_is_split(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = byte_level().encode(text, add_special_tokens=False).ids
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    stream, out, num_tokens = TextStream(chatml_model(), stops), "", 0
    for start, end in pairwise(edges):
        delta = stream.push(ids[start:end])
        out += delta.text
        num_tokens += delta.num_tokens
        assert delta.stopped == stream.is_stopped
    out += stream.flush()
    expected = cut(text, stops)
    if expected is None:
        assert (out, num_tokens, stream.is_stopped) == (text, len(ids), False)
        return
    assert out == expected[0]
    sizes = [len(chatml_model().token_bytes(each)) for each in ids]
    end_byte = len(text[: expected[1]].encode())
    assert sum(sizes[: num_tokens - 1]) < end_byte <= sum(sizes[:num_tokens])


def feed(stops: list[str], pieces: list[str]) -> list[str]:
    matcher = StopMatcher(stops)
    return [*map(matcher.feed, pieces), matcher.flush()]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["a S", "T", "O", "P b"], ["a ", "", "", "", ""]),
        (["STOP"], ["a S", "T", "X"], ["a ", "", "STX", ""]),
        (["STOP"], ["ST"], ["", "ST"]),
        (["abcdX", "bc"], ["ab", "c", "dX"], ["", "a", "", ""]),
        (["abab", "abc"], ["aba", "bab"], ["", "", ""]),
        (["END", "D"], ["EN", "D"], ["", "", ""]),
        (["\n\n"], ["line\n", "next\n", "\n"], ["line", "\nnext", "", ""]),
        (["aab"], ["aa", "a", "a", "b"], ["", "a", "a", "", ""]),
        (["\ufffd!"], ["x\ufffd", "!"], ["x", "", ""]),
    ],
)
def test_what_is_released_and_when(stops: list[str], pieces: list[str], expected: list[str]) -> None:
    released = feed(stops, pieces)
    assert released + [""] * (len(expected) - len(released)) == expected


def test_stop_on_the_last_token_of_a_merged_push_and_nothing_after() -> None:
    ids = byte_level().encode("xySTOPzz", add_special_tokens=False).ids
    stream = TextStream(chatml_model(), ["STOP"])
    delta = stream.push(ids)
    assert (delta.text, delta.stopped) == ("xy", True)
    assert b"".join(map(chatml_model().token_bytes, ids[: delta.num_tokens])).endswith(b"STOP")
    assert stream.push(ids) == ("", True, 0)
    assert stream.flush() == ""


def test_replacement_at_the_flush_can_complete_a_stop_string() -> None:
    ids = byte_level().encode("ok😀", add_special_tokens=False).ids
    stream = TextStream(chatml_model(), ["k\ufffd"])
    assert stream.push(ids[:-1]).text == "o"
    assert stream.flush() == ""
    assert stream.is_stopped


def test_special_token_never_completes_a_stop_string() -> None:
    end = token_id(byte_level(), "<|end|>")
    stream = TextStream(chatml_model(), ["<|end|>"])
    assert stream.push([end]) == ("", False, 1)
    assert stream.push(chatml_model().encode_text("<|end|>")).stopped


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 1 character"):
        TextStream(chatml_model(), ["ok", ""])


def test_cost_of_a_long_tail_does_not_grow_with_the_text() -> None:
    """A stop string of 256 characters that almost matches all the time holds back 255 characters at most."""
    stop = "a" * 255 + "b"
    matcher = StopMatcher([stop])
    out = "".join(matcher.feed("a") for _ in range(5000))
    assert len(out) == 5000 - 255
    assert matcher.feed("b") == ""
    assert matcher.matched
