"""Turn a growing list of token ids into text: whole characters only, up to the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gateway.text.stop import StopMatcher
from gateway.text.tokenizer import TextModel
from gateway.text.vocabulary import Vocabulary


class TextDelta(NamedTuple):
    """What a push of token ids added to the text."""

    text: str  # whole characters, without anything that may still become a stop string
    stopped: bool  # a stop string is complete: the text has ended
    num_tokens: int  # tokens taken; when a stop string ends the text, up to and including the one that completed it


class TextStream:
    """One request's way from token ids to text; the same for a streamed and a whole answer.

    The texts of all deltas and of `flush`, joined, are the text of all tokens decoded at once, however they were split
    into pushes, cut before the first stop string to become complete. Invalid UTF-8 becomes U+FFFD, one for each maximal
    invalid part. Special tokens and end-of-sequence tokens have no text.
    """

    __slots__ = ("_decoder", "_matcher")

    def __init__(self, model: TextModel, stop: Sequence[str] = (), hidden_token_ids: Collection[int] = ()) -> None:
        """`hidden_token_ids`: never text in this request, e.g. its stop token ids.

        Raises InvalidRequestError if a stop string is empty.
        """
        self._decoder = _Decoder(model.vocabulary, hidden_token_ids)
        self._matcher = StopMatcher(stop) if stop else None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._matcher is not None and self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens. After the text has stopped no more tokens are taken."""
        decode, matcher = self._decoder.decode, self._matcher
        if matcher is None:
            if len(token_ids) == 1:
                return TextDelta(decode(token_ids[0]), False, 1)
            return TextDelta("".join(map(decode, token_ids)), False, len(token_ids))
        parts: list[str] = []
        for num_taken, token_id in enumerate(token_ids, start=1):
            if matcher.matched:
                return TextDelta("".join(parts), True, num_taken - 1)
            text = decode(token_id)
            if text:
                parts.append(matcher.feed(text))
        return TextDelta("".join(parts), matcher.matched, len(token_ids))

    def flush(self) -> str:
        """No more tokens come: return the text held back. An unfinished character may still complete a stop string."""
        text = self._decoder.flush()
        if self._matcher is None:
            return text
        return self._matcher.feed(text) + self._matcher.flush()


class _Decoder:
    """Token ids in, characters out; keeps the bytes of an unfinished character."""

    __slots__ = (
        "_hidden",
        "_is_first",
        "_is_start",
        "_pieces",
        "_size",
        "_strip_left",
        "_texts",
        "_utf8",
        "_vocabulary",
    )

    def __init__(self, vocabulary: Vocabulary, hidden_token_ids: Collection[int]) -> None:
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts
        self._pieces = vocabulary.pieces
        self._size = vocabulary.size
        self._hidden = frozenset(hidden_token_ids)
        self._utf8: codecs.IncrementalDecoder | None = None  # set while a character is unfinished
        self._is_first = vocabulary.decoding.first_piece is not None
        self._strip_left = vocabulary.decoding.max_strip
        self._is_start = self._is_first or self._strip_left > 0

    def decode(self, token_id: int) -> str:
        """The characters that this token completes."""
        if not 0 <= token_id < self._size or token_id in self._hidden:
            return ""
        if self._is_start:
            return self._decode_start(token_id)
        if self._utf8 is None:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._decode_bytes(self._pieces[token_id])

    def _decode_bytes(self, piece: bytes) -> str:
        if self._utf8 is None:
            # "replace" puts one U+FFFD for each maximal invalid part, as the byte-level decoder of `tokenizers` does.
            self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._utf8.decode(piece)
        if not self._utf8.getstate()[0]:
            self._utf8 = None
        return text

    def _decode_start(self, token_id: int) -> str:
        """Like `decode` where the first token's piece differs or leading characters are stripped."""
        if not self._vocabulary.has_text(token_id):
            return ""
        text = self._decode_bytes(self._vocabulary.first_piece(token_id) if self._is_first else self._pieces[token_id])
        self._is_first = False
        while self._strip_left and text:
            if text[0] != self._vocabulary.decoding.strip_char:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        self._is_start = self._strip_left > 0
        return text

    def flush(self) -> str:
        """The bytes end here: what stands for an unfinished character."""
        if self._utf8 is None:
            return ""
        text = self._utf8.decode(b"", final=True)
        self._utf8 = None
        return text
