"""A model as a gateway serves it."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import ModelDescription, ModelLimits
from gateway.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that some worker serves or has served: what turns its text into tokens and back, and its limits."""

    description: ModelDescription
    text: TextModel

    @property
    def limits(self) -> ModelLimits:
        """Limits as the describing worker stated them."""
        return self.description.limits
