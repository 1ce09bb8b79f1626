"""What each token id contributes to the text, in bytes, compiled from the decoder of a `tokenizers` file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace with a string, Strip, Sequence"

Step = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How token strings become text: bytes per token, joined, decoded as UTF-8, some leading characters stripped."""

    piece: Callable[[str], bytes]
    first_piece: Callable[[str], bytes] | None  # for the first token of a text, if it differs
    strip_char: str = ""  # stripped from the start of the text,
    max_strip: int = 0  # this many times at most


def compile_decoding(decoder: Mapping[str, Any] | None) -> Decoding:
    """Read the `decoder` of a tokenizer file. Raises ValueError if it has a step that is not supported."""
    if decoder is None:  # `tokenizers` then joins the tokens with spaces
        return Decoding(lambda token: f" {token}".encode(), str.encode)
    steps: list[Step] = []
    to_bytes: Callable[[str], bytes] = str.encode
    first: Step | None = None
    fused = False
    strip_char, max_strip = "", 0
    for spec in _flatten(decoder):
        kind = spec["type"]
        whole_token = to_bytes is str.encode and not fused
        if kind == "Fuse":
            fused = True
        elif kind == "ByteLevel" and whole_token:
            to_bytes, fused = _byte_level, True
        elif kind == "ByteFallback" and whole_token:
            to_bytes = _byte_fallback
        elif kind == "Replace" and whole_token and "String" in spec["pattern"]:
            steps.append(_replace(spec["pattern"]["String"], spec["content"]))
        elif kind == "Metaspace" and whole_token and first is None:
            steps.append(_replace(spec["replacement"], " "))
            if spec.get("prepend_scheme", "always") != "never":
                first = _replace(spec["replacement"], "")
        elif kind == "Strip" and fused and not spec["stop"] and not max_strip:
            strip_char, max_strip = spec["content"], spec["start"]
        else:
            raise ValueError(f"tokenizer decoder step {spec} is not supported here; supported are {_SUPPORTED}")
    first_piece = None if first is None else _chain([first, *steps], to_bytes)
    return Decoding(_chain(steps, to_bytes), first_piece, strip_char, max_strip)


def _flatten(decoder: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _flatten(step)


def _replace(old: str, new: str) -> Step:
    return lambda token: token.replace(old, new)


def _chain(steps: list[Step], to_bytes: Callable[[str], bytes]) -> Callable[[str], bytes]:
    def piece(token: str) -> bytes:
        # A byte token is a byte, whatever the other steps would make of its spelling.
        if to_bytes is _byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return _byte_fallback(token)
        for step in steps:
            token = step(token)
        return to_bytes(token)

    return piece


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(0x100) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_LEVEL[char] for char in token])
    except KeyError:  # an added token spelt in plain text
        return token.encode()


class Vocabulary:
    """The pieces of all token ids of a model; ids without text (special, padding) have the empty piece."""

    def __init__(
        self, tokens: Mapping[int, str], silent_ids: Collection[int], num_ids: int, decoding: Decoding
    ) -> None:
        """`tokens`: string by id; `silent_ids`: never text; `num_ids`: rows of the embedding, at least."""
        self.decoding = decoding
        self.size = max(num_ids, max(tokens, default=-1) + 1)
        self._tokens = tokens
        self._silent_ids = frozenset(silent_ids)
        self.pieces: list[bytes] = [b""] * self.size
        # The piece as text where it is whole characters, which saves decoding it again for every request.
        self.texts: list[str | None] = [""] * self.size
        for token_id, token in tokens.items():
            if token_id not in self._silent_ids:
                piece = decoding.piece(token)
                self.pieces[token_id] = piece
                self.texts[token_id] = _whole_text(piece)

    @property
    def max_piece_bytes(self) -> int:
        """Bytes of the longest piece."""
        return max(map(len, self.pieces), default=0)

    def has_text(self, token_id: int) -> bool:
        """Whether this is a token, and one that shows in text."""
        return token_id in self._tokens and token_id not in self._silent_ids

    def first_piece(self, token_id: int) -> bytes:
        """The piece of a token that `has_text`, if it is the first one."""
        return (self.decoding.first_piece or self.decoding.piece)(self._tokens[token_id])

    def spelling(self, token_id: int) -> bytes:
        """The token's own bytes, those of special tokens too; empty for an id that has no token."""
        if token_id in self._silent_ids:
            return self._tokens.get(token_id, "").encode()
        return self.pieces[token_id] if 0 <= token_id < self.size else b""


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
