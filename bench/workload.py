"""Reproducible work for engines: prompts as token ids and the number of tokens each must generate."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 40_000
"""Random prompt tokens, both ends included: above the special tokens, inside every vocabulary that is measured."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request: a prompt and a forced output length, so that every engine makes the same number of tokens."""

    prompt: tuple[int, ...]
    num_output: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of traffic; lengths in tokens, drawn uniformly with both ends included."""

    name: str
    up_to: float  # cumulative share of requests, of this kind and those before it
    prompt: tuple[int, int]
    output: tuple[int, int]


MIX = (
    Kind("dialogue", up_to=0.60, prompt=(20, 200), output=(50, 150)),
    Kind("retrieval", up_to=0.85, prompt=(400, 1600), output=(30, 100)),
    Kind("long writing", up_to=1.00, prompt=(30, 100), output=(400, 800)),
)
"""60 % dialogue, 25 % retrieval over long contexts, 15 % long writing."""


def mixed(num_requests: int, *, seed: int = 0, scale: float = 1.0) -> list[Work]:
    """`num_requests` drawn from `MIX`; the same seed gives the same tokens. `scale` shortens all lengths (at least 1).

    The order of draws is part of the workload (kind, prompt length, output length, tokens): figures stay comparable
    over time only while it is kept.
    """
    rng = random.Random(seed)
    work = []
    for _ in range(num_requests):
        draw = rng.random()
        kind = next(kind for kind in MIX if draw < kind.up_to)
        num_prompt, num_output = rng.randint(*kind.prompt), rng.randint(*kind.output)
        prompt = tuple(rng.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(max(1, int(num_prompt * scale))))
        work.append(Work(prompt, max(1, int(num_output * scale))))
    return work


def decode_only(batch_size: int, *, num_prompt: int = 32, num_output: int = 128) -> list[Work]:
    """`batch_size` requests of equal length that start together: the decode rate at that batch size.

    Each repeats one token of its own, so none finds another's prompt in a prefix cache.
    """
    return [Work((5 + index,) * num_prompt, num_output) for index in range(batch_size)]


SUITE: dict[str, Callable[[], list[Work]]] = {
    "decode, batch 1": lambda: decode_only(1),
    "decode, batch 8": lambda: decode_only(8),
    "decode, batch 32": lambda: decode_only(32),
    "mixed, 64 requests": lambda: mixed(64),
}
"""What every engine is measured on, by name."""
