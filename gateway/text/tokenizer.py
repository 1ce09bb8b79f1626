"""A model's text side: messages and text to token ids, token ids to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from common.errors import InvalidRequestError
from common.types import ModelDescription, Reason
from gateway.text.control import ControlTokens, rename_in_file, without_reserved
from gateway.text.template import ChatTemplate
from gateway.text.vocabulary import Vocabulary, compile_decoding

ROLES = ("system", "user", "assistant")

# How many times shorter, in UTF-8 bytes, a normalizer can make a text; any that is not named here may leave nothing.
# Canonical composition makes at most 7 bytes 2: a Greek iota in its 3-byte form with two marks.
_SHRINKS = {"Prepend": 1, "NFC": 4}

# Texts whose tokens are kept, and how long they may be: some MiB at most.
_NUM_REMEMBERED = 256
_REMEMBERED_CHARACTERS = 2_000


def utc_now() -> datetime:
    """The same date on every gateway, so that they make the same prompt of the same conversation."""
    return datetime.now(UTC)


class TextModel:
    """Tokenizer, chat template and vocabulary of one model; immutable, for any number of requests and threads.

    Building one parses the whole tokenizer file (tenths of a second to seconds) and encoding megabytes takes as long:
    call both outside an event loop. The tokenizer works without the interpreter lock.

    Special tokens (and the end-of-sequence and begin-of-sequence tokens) come only from the template and from
    `add_bos_token`: text that spells one is encoded as the text it is, in every position. Added tokens that the model
    does not declare special are ordinary text and are recognised everywhere.
    """

    def __init__(self, description: ModelDescription, now: Callable[[], datetime] = utc_now) -> None:
        """`now`: for templates that state today's date.

        Raises ValueError if the tokenizer file cannot be used; says why.
        """
        file = _parse(description.tokenizer_json)
        self.limits = description.limits
        self._bos = (
            (description.bos_token_id,) if description.add_bos_token and description.bos_token_id is not None else ()
        )
        stop_ids = {*description.eos_token_ids, description.bos_token_id}
        spellings = [token["content"] for token in file["added_tokens"] if token["special"] or token["id"] in stop_ids]
        self._control = ControlTokens(list(dict.fromkeys(spellings)))
        self._tokenizer = _build(rename_in_file(file, self._control, spellings))
        self._template = ChatTemplate(
            description.chat_template, bos_token=description.bos_token, eos_token=description.eos_token, now=now
        )
        tokens = {token_id: token for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        special_ids = set(description.eos_token_ids)
        for spelling in spellings:
            token_id = self._tokenizer.token_to_id(self._control.name(spelling))
            if token_id is not None:
                tokens[token_id] = spelling
                special_ids.add(token_id)
        self.vocabulary = Vocabulary(
            tokens, special_ids, description.limits.vocab_size, compile_decoding(file["decoder"])
        )
        self._bound = _bound(file, self.vocabulary)
        # Refused for now, sent again: the same text comes back at the worst of times.
        self._recent = lru_cache(_NUM_REMEMBERED)(self._tokenize)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation, (role, content) oldest first, up to where the assistant's answer begins.

        Raises InvalidRequestError: EMPTY_PROMPT without messages, TEMPLATE_ERROR for an unknown role or what the
        template refuses, MALFORMED_MESSAGE for text that UTF-8 cannot carry.
        """
        if not messages:
            raise InvalidRequestError.of_field(
                "chat.messages", "there are none; at least one is needed", Reason.EMPTY_PROMPT
            )
        quoted = []
        for index, (role, content) in enumerate(messages):
            if role not in ROLES:
                raise InvalidRequestError.of_field(
                    f"chat.messages[{index}].role",
                    f"{role[:32]!r} is not a role; allowed are {', '.join(ROLES)}",
                    Reason.TEMPLATE_ERROR,
                )
            _require_utf8(f"chat.messages[{index}].content", content)
            quoted.append({"role": role, "content": self._control.quote(content)})
        rendered = self._control.resolve(self._template.render(quoted))
        _require_utf8("chat.messages", rendered)
        return self._encode("chat.messages", rendered)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, after the begin-of-sequence token if the model wants one.

        Raises InvalidRequestError: EMPTY_PROMPT, or MALFORMED_MESSAGE for text that UTF-8 cannot carry.
        """
        if not text:
            raise InvalidRequestError.of_field(
                "text", "it is empty; at least 1 character is needed", Reason.EMPTY_PROMPT
            )
        _require_utf8("text", text)
        return [*self._bos, *self._encode("text", without_reserved(text))]

    def _encode(self, field: str, text: str) -> list[int]:
        token_ids = self._recent(text) if len(text) <= _REMEMBERED_CHARACTERS else self._tokenize(text)
        if not token_ids:
            raise InvalidRequestError.of_field(field, "it has no tokens; at least 1 is needed", Reason.EMPTY_PROMPT)
        return list(token_ids)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        # The batch call leaves the interpreter lock alone and computes no offsets.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoding.ids)

    def min_tokens(self, text: str) -> int:
        """A lower bound of the tokens that `text` takes, without tokenizing it; 0 where nothing is certain."""
        if not self._bound.max_bytes_per_token:
            return 0
        kept = text.encode(errors="replace").translate(None, self._bound.dropped)
        return -(-len(kept) // self._bound.max_bytes_per_token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be part of a character; a special one's spelling; empty if there is none."""
        return self.vocabulary.spelling(token_id)


def _parse(tokenizer_json: bytes) -> dict[str, Any]:
    try:
        file = json.loads(tokenizer_json)
    except ValueError as error:
        raise ValueError(f"the model's tokenizer file is not JSON: {error}") from error
    if not isinstance(file, dict) or not {"added_tokens", "decoder", "model"} <= file.keys():
        raise ValueError("the model's tokenizer file lacks one of: added_tokens, decoder, model")
    return file


def _build(file: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(file)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"the model's tokenizer file cannot be used: {error}") from error


def _require_utf8(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError.of_field(
            field,
            f"character {error.start} is half of a surrogate pair; allowed is text that UTF-8 can carry",
            Reason.MALFORMED_MESSAGE,
        ) from error


@dataclass(frozen=True, slots=True)
class _Bound:
    """What is certain about text and its tokens."""

    max_bytes_per_token: int  # of the text that one token stands for; 0: unknown
    dropped: bytes  # bytes that the tokenizer may leave out


def _bound(file: dict[str, Any], vocabulary: Vocabulary) -> _Bound:
    single = {piece for piece in vocabulary.pieces if len(piece) == 1}
    dropped = bytes(byte for byte in range(256) if bytes([byte]) not in single)
    is_byte_level = (file["decoder"] or {}).get("type") == "ByteLevel"
    has_fallback = file["model"].get("byte_fallback") and not dropped
    swallows = any(token["lstrip"] or token["rstrip"] for token in file["added_tokens"])
    if file["model"]["type"] != "BPE" or swallows or not (is_byte_level or has_fallback):
        return _Bound(0, b"")
    if not _keeps_all(file.get("pre_tokenizer")):
        return _Bound(0, b"")
    return _Bound(vocabulary.max_piece_bytes * _max_shrink(file.get("normalizer")), dropped)


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer splits without dropping anything."""
    if pre_tokenizer is None or pre_tokenizer["type"] in {"ByteLevel", "Metaspace", "Digits"}:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in {"Split", "Punctuation"} and pre_tokenizer["behavior"] != "Removed"


def _max_shrink(normalizer: dict[str, Any] | None) -> int:
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            product *= _max_shrink(step)
        return product
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return 1 if old is not None and len(normalizer["content"].encode()) >= len(old.encode()) else 0
    return _SHRINKS.get(normalizer["type"], 0)
