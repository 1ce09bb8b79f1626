"""Which worker this is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker, and which of its lives: a later start has a larger epoch."""

    worker_id: str
    epoch: int
