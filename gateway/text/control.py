"""Keep control tokens in the template's hands: text of a message can spell one, and it stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Two noncharacters of Unicode: never part of text in interchange, so they can serve as our own quotation marks.
_NAME_MARK = "\U0010ffff"
_QUOTE = "\U0010fffe"
_RESERVED = str.maketrans({_NAME_MARK: "\ufffd", _QUOTE: "\ufffd"})
_QUOTED = re.compile(f"{_QUOTE}([\U000f0000-\U000fffff]?){_QUOTE}")
_FIRST_INDEX = 0xF0000


def without_reserved(text: str) -> str:
    """`text` with the two noncharacters that this module keeps for itself replaced by U+FFFD."""
    return text.translate(_RESERVED) if _NAME_MARK in text or _QUOTE in text else text


class ControlTokens:
    """The special tokens of a model under secret names.

    In the tokenizer that we build from the model's file, each special token is renamed to a name with a noncharacter in
    it. So no text can spell one, whatever the tokenizer does with added tokens. What the template itself writes is
    renamed after rendering; to tell it from what a message spells, the latter is quoted before rendering.
    """

    def __init__(self, spellings: Sequence[str]) -> None:
        """`spellings`: of the special tokens, without repeats."""
        self._spellings = tuple(spellings)
        self._index = {spelling: index for index, spelling in enumerate(self._spellings)}
        longest_first = sorted(self._spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._heads = tuple({text[:size] for text in self._spellings for size in range(1, len(text))})
        self._tails = tuple({text[size:] for text in self._spellings for size in range(1, len(text))})

    def name(self, spelling: str) -> str:
        """The secret name of a special token."""
        return f"{_NAME_MARK}{self._index[spelling]}{_NAME_MARK}"

    def quote(self, text: str) -> str:
        """`text` with every special token that it spells, or could spell together with its neighbours, quoted."""
        text = without_reserved(text)
        if self._pattern is None:
            return text
        head = _QUOTE * 2 if text.startswith(self._tails) else ""
        tail = _QUOTE * 2 if text.endswith(self._heads) else ""
        return head + self._pattern.sub(lambda match: self._quoted(match[0]), text) + tail

    def _quoted(self, spelling: str) -> str:
        return f"{_QUOTE}{chr(_FIRST_INDEX + self._index[spelling])}{_QUOTE}"

    def resolve(self, rendered: str) -> str:
        """Name the special tokens that the template wrote, and unquote those that messages spell."""
        if self._pattern is not None:
            rendered = self._pattern.sub(lambda match: self.name(match[0]), rendered)
        if _QUOTE not in rendered:
            return rendered
        return _QUOTED.sub(self._unquote, rendered).replace(_QUOTE, "")

    def _unquote(self, match: re.Match[str]) -> str:
        return self._spellings[ord(match[1]) - _FIRST_INDEX] if match[1] else ""


def rename_in_file(tokenizer: Mapping[str, Any], control: ControlTokens, spellings: Collection[str]) -> str:
    """A `tokenizers` file with `spellings` under their secret names, and nothing that would cut, pad or vary text."""
    names = {spelling: control.name(spelling) for spelling in spellings}
    added = [
        {**token, "content": names[token["content"]], "single_word": False} if token["content"] in names else token
        for token in tokenizer["added_tokens"]
    ]
    model = dict(tokenizer["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in model["vocab"].items()}
    else:  # Unigram: pairs of piece and score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "dropout" in model:
        model["dropout"] = None
    changes = {"added_tokens": added, "model": model, "post_processor": None, "truncation": None, "padding": None}
    return json.dumps({**tokenizer, **changes}, ensure_ascii=False)


def _touches(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    """Whether a merge makes or uses a renamed token."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
