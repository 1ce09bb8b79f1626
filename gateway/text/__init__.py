"""Between text and token ids, as one model sees them: pure, without input or output."""

from gateway.text.detokenizer import TextDelta, TextStream
from gateway.text.tokenizer import ROLES, TextModel

__all__ = ["ROLES", "TextDelta", "TextModel", "TextStream"]
