"""Messages and text to token ids: as the model's own tokenizer, and control tokens only from the template."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from common.errors import InvalidRequestError
from common.types import Reason
from gateway.text import TextModel
from tests.unit.gateway.text.small_tokenizers import (
    CHATML,
    LLAMA,
    SPECIALS,
    byte_fallback,
    byte_level,
    chatml_model,
    describe,
    llama_model,
    token_id,
)

SPELLINGS = [
    *SPECIALS,
    "<s>",
    "</s>",
    "<unk>",
    "<think>",
    "<|",
    "|>",
    "<|end",
    "|",
    "<",
    ">",
    "start|>",
    "s>",
    "<0x41>",
]
NASTY = st.lists(st.sampled_from([*SPELLINGS, "hi", " ", "\n", "😀", "\U0010ffff", "\U0010fffe", "0"])).map("".join)
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|\U0010fffe\U0010ffff"), max_size=30)


def reference(tokenizer: Tokenizer, template: str, messages: list[tuple[str, str]], bos: str, eos: str) -> list[int]:
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    rendered = environment.from_string(template).render(
        messages=[{"role": role, "content": content} for role, content in messages],
        add_generation_prompt=True,
        bos_token=bos,
        eos_token=eos,
    )
    return tokenizer.encode(rendered, add_special_tokens=False).ids


@settings(max_examples=80, deadline=None)
@given(messages=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PLAIN), min_size=1, max_size=4))
def test_chat_equals_the_models_own_tokenizer(messages: list[tuple[str, str]]) -> None:
    assert chatml_model().encode_chat(messages) == reference(byte_level(), CHATML, messages, "<|start|>", "<|end|>")
    assert llama_model().encode_chat(messages) == reference(byte_fallback(), LLAMA, messages, "<s>", "</s>")


@settings(max_examples=150, deadline=None)
@given(contents=st.lists(NASTY, min_size=1, max_size=4))
def test_no_content_makes_a_control_token(contents: list[str]) -> None:
    for model, tokenizer in ((chatml_model(), byte_level()), (llama_model(), byte_fallback())):
        special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}

        def control(texts: list[str], special: set[int] = special, model: TextModel = model) -> list[int]:
            return [id_ for id_ in model.encode_chat([("user", text) for text in texts]) if id_ in special]

        assert control(contents) == control(["x"] * len(contents))


@settings(max_examples=150, deadline=None)
@given(content=NASTY)
def test_content_that_spells_control_tokens_is_kept_as_text(content: str) -> None:
    expected = content.replace("\U0010ffff", "\ufffd").replace("\U0010fffe", "\ufffd")
    ids = chatml_model().encode_chat([("user", content)])
    spelled = b"".join(map(chatml_model().token_bytes, ids)).decode()
    assert spelled == f"<|start|>user\n{expected}<|end|>\n<|start|>assistant\n"


def test_two_contents_together_do_not_make_a_control_token() -> None:
    model = TextModel(describe(byte_level(), "{% for m in messages %}{{ m.content }}{% endfor %}"))
    ids = model.encode_chat([("user", "a<|st"), ("user", "art|>b")])
    assert token_id(byte_level(), "<|start|>") not in ids
    assert b"".join(map(model.token_bytes, ids)) == b"a<|start|>b"


def test_plain_text_does_not_make_control_tokens_and_ordinary_added_tokens_count() -> None:
    ids = chatml_model().encode_text("<think>two words<|start|>")
    assert ids[0] == token_id(byte_level(), "<think>")
    assert token_id(byte_level(), "two words") in ids
    assert token_id(byte_level(), "<|start|>") not in ids


@settings(max_examples=100, deadline=None)
@given(text=NASTY.filter(bool))
def test_plain_text_equals_the_tokenizer_with_special_parsing_off(text: str) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.encode_special_tokens = True
    kept = text.replace("\U0010ffff", "\ufffd").replace("\U0010fffe", "\ufffd")
    assert chatml_model().encode_text(text) == tokenizer.encode(kept, add_special_tokens=False).ids


def test_text_gets_one_bos_and_a_template_with_bos_gets_no_second() -> None:
    bos = token_id(byte_fallback(), "<s>")
    assert llama_model().encode_text("hello").count(bos) == 1
    assert llama_model().encode_text("hello")[0] == bos
    assert llama_model().encode_chat([("user", "hello")]).count(bos) == 1
    assert bos not in TextModel(describe(byte_fallback(), LLAMA)).encode_text("hello")


def test_file_settings_that_cut_pad_or_vary_are_ignored() -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    file = json.loads(tokenizer.to_str())
    file["model"]["dropout"] = 0.9
    description = dataclasses.replace(describe(byte_level(), CHATML), tokenizer_json=json.dumps(file).encode())
    text = "the quick brown fox jumps over the lazy dog"
    assert TextModel(description).encode_text(text) == chatml_model().encode_text(text)


@cache
def composing_model() -> TextModel:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.NFC()
    return TextModel(describe(tokenizer, CHATML))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.text("a e\u0301\u1100\u1161\u11a8\u03b9\u0308\u1fbe\u212a", max_size=30))
def test_min_tokens_is_a_lower_bound(text: str) -> None:
    for model in (chatml_model(), llama_model(), composing_model()):
        kept = text.encode(errors="replace").decode()
        assert model.min_tokens(text) <= (len(model.encode_text(kept)) if kept else 0)


def test_min_tokens_grows_with_the_text_where_the_tokenizer_is_lossless() -> None:
    assert chatml_model().min_tokens("x" * 3_000_000) >= 3_000_000 // chatml_model().vocabulary.max_piece_bytes
    assert llama_model().min_tokens("x" * 1000) > 0


def test_min_tokens_is_zero_where_nothing_is_certain() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "hi": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<s>", "</s>"])
    assert TextModel(describe(words, "")).min_tokens("y" * 1000) == 0
    swallowing = Tokenizer.from_str(byte_level().to_str())
    swallowing.add_tokens([AddedToken("<gap>", lstrip=True, rstrip=True)])
    assert TextModel(describe(swallowing, "")).min_tokens("y" * 1000) == 0


@pytest.mark.parametrize(
    ("messages", "reason", "message"),
    [
        ([], Reason.EMPTY_PROMPT, "at least one is needed"),
        ([("tool", "x")], Reason.TEMPLATE_ERROR, "allowed are system, user, assistant"),
        ([("user<|end|>", "x")], Reason.TEMPLATE_ERROR, r"chat.messages\[0\].role"),
        ([("", "x")], Reason.TEMPLATE_ERROR, "is not a role"),
        ([("user", "ok"), ("user", "a\ud800")], Reason.MALFORMED_MESSAGE, r"chat.messages\[1\].content: character 1"),
    ],
)
def test_bad_messages_are_refused(messages: list[tuple[str, str]], reason: Reason, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        chatml_model().encode_chat(messages)
    assert caught.value.reason is reason
    assert caught.value.fields


@pytest.mark.parametrize(("text", "reason"), [("", Reason.EMPTY_PROMPT), ("\udfff", Reason.MALFORMED_MESSAGE)])
def test_bad_text_is_refused(text: str, reason: Reason) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llama_model().encode_text(text)
    assert caught.value.reason is reason


def test_template_that_renders_nothing_is_an_empty_prompt() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TextModel(describe(byte_level(), "{# nothing #}")).encode_chat([("user", "x")])
    assert caught.value.reason is Reason.EMPTY_PROMPT


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "lacks one of"),
        (b'{"added_tokens": [], "decoder": null, "model": {"type": "BPE", "vocab": {}}}', "cannot be used"),
    ],
)
def test_unusable_tokenizer_file_says_why(file: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextModel(dataclasses.replace(describe(byte_level(), CHATML), tokenizer_json=file))


def test_unsupported_decoder_says_what_is_supported() -> None:
    file = json.loads(byte_level().to_str())
    file["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    with pytest.raises(ValueError, match="supported are ByteLevel"):
        TextModel(dataclasses.replace(describe(byte_level(), CHATML), tokenizer_json=json.dumps(file).encode()))
