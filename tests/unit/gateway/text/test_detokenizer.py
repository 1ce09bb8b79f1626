"""Token ids to text: any split gives the full decode, whole characters only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.text import TextModel, TextStream
from tests.unit.gateway.text.small_tokenizers import (
    byte_fallback,
    byte_level,
    chatml_model,
    llama_model,
    metaspace,
    metaspace_model,
    token_id,
)

TEXTS = [
    "😀👍🏽👩‍👩‍👧‍👦",
    "中文和日本語",
    "e\u0301 \u00e9 \u200d",
    "a b  c\n\n",
    " leading",
    "  two",
    "▁x",
    "\x00\x07",
    "plain words",
]
Family = tuple[Callable[[], Tokenizer], Callable[[], TextModel]]
FAMILIES: list[Family] = [(byte_level, chatml_model), (byte_fallback, llama_model), (metaspace, metaspace_model)]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


def stream_text(model: TextModel, pushes: list[list[int]]) -> str:
    stream = TextStream(model)
    deltas = [stream.push(push) for push in pushes]
    assert [delta.num_tokens for delta in deltas] == [len(push) for push in pushes]
    return "".join(delta.text for delta in deltas) + stream.flush()


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, byte_level().get_vocab_size() + 20), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_byte_level_stream_equals_full_decode(ids: list[int], cuts: list[int]) -> None:
    assert stream_text(chatml_model(), split(ids, cuts)) == byte_level().decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(
        st.integers(0x80, 0xFF) | st.sampled_from(list(b"a\xe4\xb8\xad\xf0\x9f\x98\x80\xed\xa0")), max_size=24
    ),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_invalid_bytes_become_the_same_replacements_as_in_a_full_decode(data: list[int], cuts: list[int]) -> None:
    by_byte = {chatml_model().token_bytes(i): i for i in range(byte_level().get_vocab_size())}
    ids = [by_byte[bytes([byte])] for byte in data]
    text = stream_text(chatml_model(), split(ids, cuts))
    assert text == byte_level().decode(ids)
    assert text == bytes(data).decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(st.sampled_from(TEXTS) | st.text(max_size=6), max_size=6).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    family=st.sampled_from(FAMILIES[:2]),
)
def test_text_returns_as_it_was_and_no_delta_has_half_a_character(text: str, cuts: list[int], family: Family) -> None:
    tokenizer, model = family[0](), family[1]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole == text.replace("▁", " ") or (tokenizer is byte_level() and whole == text)
    stream, seen = TextStream(model), ""
    for push in split(ids, cuts):
        delta = stream.push(push).text
        seen += delta
        assert whole.startswith(seen)
    assert seen + stream.flush() == whole


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(259, byte_fallback().get_vocab_size() - 1) | st.just(1), max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    family=st.sampled_from(FAMILIES[1:]),
)
def test_space_marks_at_the_start_are_treated_as_in_a_full_decode(
    ids: list[int], cuts: list[int], family: Family
) -> None:
    assert stream_text(family[1](), split(ids, cuts)) == family[0]().decode(ids, skip_special_tokens=True)


def test_every_prefix_emits_all_whole_characters() -> None:
    """After each token the text is all that is decoded so far, less an unfinished character."""
    ids = byte_level().encode("ok 👩‍👧 中", add_special_tokens=False).ids
    stream, seen = TextStream(chatml_model()), ""
    for count in range(1, len(ids) + 1):
        seen += stream.push([ids[count - 1]]).text
        data = b"".join(map(chatml_model().token_bytes, ids[:count]))
        assert seen == data.decode(errors="ignore")


def test_unfinished_character_is_flushed_as_one_replacement() -> None:
    ids = byte_level().encode("😀", add_special_tokens=False).ids
    assert len(ids) > 1
    stream = TextStream(chatml_model())
    assert stream.push(ids[:-1]).text == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_token_inside_a_character_does_not_break_it() -> None:
    ids = byte_level().encode("😀", add_special_tokens=False).ids
    end = token_id(byte_level(), "<|end|>")
    assert stream_text(chatml_model(), [[ids[0], end], [*ids[1:], end]]) == "😀"


def test_special_token_has_bytes_and_no_text() -> None:
    end = token_id(byte_level(), "<|end|>")
    assert chatml_model().token_bytes(end) == b"<|end|>"
    assert stream_text(chatml_model(), [[end]]) == ""


def test_spelling_of_a_special_token_is_ordinary_text() -> None:
    ids = chatml_model().encode_text("say <|end|> now")
    assert stream_text(chatml_model(), [ids]) == "say <|end|> now"


def test_hidden_tokens_have_no_text() -> None:
    [hello] = byte_level().encode("the", add_special_tokens=False).ids
    assert TextStream(chatml_model(), hidden_token_ids=[hello]).push([hello]).text == ""
    assert TextStream(chatml_model()).push([hello]).text == "the"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert stream_text(chatml_model(), [[10**9, -1, chatml_model().limits.vocab_size - 1]]) == ""
    assert [chatml_model().token_bytes(outside) for outside in (10**9, -1)] == [b"", b""]


@pytest.mark.parametrize(("token", "expected"), [("<0xE4>", b"\xe4"), ("▁", b" "), ("<s>", b"<s>")])
def test_byte_fallback_token_bytes(token: str, expected: bytes) -> None:
    assert llama_model().token_bytes(token_id(byte_fallback(), token)) == expected
