"""What requests look like: lengths, shared prefixes and kinds of traffic, drawn reproducibly or taken from a trace."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from bench.traces import BLOCK_TOKENS, Trace
from bench.workload import FIRST_TOKEN_ID, LAST_TOKEN_ID, Kind, decode_only

Prefix = tuple[str, int]
"""Name and length in tokens of a piece of text that prompts share; a longer piece of a name begins with the shorter."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One request without its tokens. Lengths in tokens; the prompt begins with the prefixes, cut to its length."""

    kind: str
    num_prompt: int
    num_output: int
    prefixes: tuple[Prefix, ...] = ()
    client: str = ""  # who sent it, where a trace says so
    arrival_s: float | None = None  # of a trace


DIALOGUE = Kind("dialogue", up_to=0.60, prompt=(60, 300), output=(40, 200))
RETRIEVAL = Kind("retrieval", up_to=0.85, prompt=(950, 3800), output=(50, 200))
LONG_WRITING = Kind("long writing", up_to=1.00, prompt=(100, 500), output=(1900, 7500))
MIX = (DIALOGUE, RETRIEVAL, LONG_WRITING)
"""60 % dialogue of 100-500 tokens, 25 % retrieval of 1K-4K, 15 % long writing of 2K-8K; prompt and output together."""

NUM_DOCUMENTS = 8
DOCUMENT_SHARE = 0.8
"""Retrieval prompts begin with one of so many documents, which takes this share of the prompt; a question follows."""

NUM_PREFIXES = 4
PREFIX = Kind("prefix", up_to=1.00, prompt=(1024, 1280), output=(32, 64))
PREFIX_TOKENS = 1024
"""The `prefix` workload: one of so many system prompts of this length before a short question."""


def mixed(num_requests: int, *, seed: int, scale: float) -> list[Shape]:
    """Requests of `MIX`; `scale` multiplies every length."""
    rng = random.Random(f"{seed}/mixed")
    shapes = []
    for _ in range(num_requests):
        draw = rng.random()
        kind = next(kind for kind in MIX if draw < kind.up_to)
        shape = _draw(rng, kind, scale)
        if kind is RETRIEVAL:
            document = f"document {rng.randrange(NUM_DOCUMENTS)}"
            shape = replace(shape, prefixes=((document, int(shape.num_prompt * DOCUMENT_SHARE)),))
        shapes.append(shape)
    return shapes


def burst(num_requests: int, *, seed: int, scale: float) -> list[Shape]:
    """Dialogue only: short requests, meant to arrive together."""
    rng = random.Random(f"{seed}/burst")
    return [_draw(rng, DIALOGUE, scale) for _ in range(num_requests)]


def prefix(num_requests: int, *, seed: int, scale: float) -> list[Shape]:
    """Short questions after one of a few long system prompts."""
    rng = random.Random(f"{seed}/prefix")
    shared = max(1, int(PREFIX_TOKENS * scale))
    return [
        replace(_draw(rng, PREFIX, scale), prefixes=((f"system {rng.randrange(NUM_PREFIXES)}", shared),))
        for _ in range(num_requests)
    ]


def decode(num_requests: int, *, seed: int, scale: float) -> list[Shape]:
    """Equal short prompts and equal outputs: nearly all steps are decodes. Nothing is drawn, so `seed` has no part."""
    work = decode_only(1)[0]
    return [Shape("decode", _scaled(len(work.prompt), scale), _scaled(work.num_output, scale))] * num_requests


WORKLOADS: dict[str, Callable[..., list[Shape]]] = {"mixed": mixed, "decode": decode, "burst": burst, "prefix": prefix}
"""By name: functions of (num_requests, seed, scale)."""


def from_trace(trace: Trace, *, scale: float) -> list[Shape]:
    """The requests of a trace; `scale` multiplies lengths, those of named prefix blocks too, and never the arrivals."""
    block_tokens = _scaled(BLOCK_TOKENS, scale)
    return [
        Shape(
            trace.path.stem,
            _scaled(row.num_prompt, scale),
            _scaled(row.num_output, scale),
            tuple((f"block {block}", block_tokens) for block in row.blocks),
            row.client,
            row.arrival_s,
        )
        for row in trace.rows
    ]


def _draw(rng: random.Random, kind: Kind, scale: float) -> Shape:
    return Shape(kind.name, _scaled(rng.randint(*kind.prompt), scale), _scaled(rng.randint(*kind.output), scale))


def _scaled(num_tokens: int, scale: float) -> int:
    return max(1, int(num_tokens * scale))


@dataclass(frozen=True, slots=True)
class Caps:
    """The longest that requests may be, in tokens, and what becomes of longer ones."""

    context_length: int  # prompt and output together
    max_prompt: int | None = None
    max_output: int | None = None
    is_dropping: bool = False  # True: too long requests are left out; False: they are shortened


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is left within the caps, and how many requests were touched for it."""

    shapes: tuple[Shape, ...]
    num_clipped: int
    num_dropped: int


def fit(shapes: Iterable[Shape], caps: Caps) -> Fitted:
    """Shortens or drops what is longer than the caps allow.

    To fit the context the prompt is cut first (at its end, so that shared prefixes stay), down to half the context.
    """
    fitted, num_clipped, num_dropped = [], 0, 0
    for shape in shapes:
        clipped = _clip(shape, caps)
        if clipped == shape:
            fitted.append(shape)
        elif caps.is_dropping:
            num_dropped += 1
        else:
            num_clipped += 1
            fitted.append(clipped)
    return Fitted(tuple(fitted), num_clipped, num_dropped)


def _clip(shape: Shape, caps: Caps) -> Shape:
    num_prompt = min(shape.num_prompt, caps.max_prompt or shape.num_prompt)
    num_output = min(shape.num_output, caps.max_output or shape.num_output)
    if num_prompt + num_output > caps.context_length:
        num_prompt = min(num_prompt, max(caps.context_length - num_output, caps.context_length // 2))
        num_output = min(num_output, caps.context_length - num_prompt)
    return replace(shape, num_prompt=num_prompt, num_output=num_output)


class TokenSource:
    """Makes prompts: shared pieces are equal within one source and differ from those of any other `salt`.

    A new salt for each run keeps the runs' prompts out of each other's prefix cache.
    """

    def __init__(self, salt: str, vocab_size: int) -> None:
        """Raises ValueError if the vocabulary is too small to draw from."""
        if vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"a vocabulary of {vocab_size} tokens; more than {FIRST_TOKEN_ID} are needed")
        self._salt = salt
        self._ids = range(FIRST_TOKEN_ID, min(LAST_TOKEN_ID + 1, vocab_size))
        self._fresh = random.Random(f"{salt}/fresh")
        self._shared: dict[str, list[int]] = {}

    def prompt(self, shape: Shape) -> tuple[int, ...]:
        """`shape.num_prompt` token ids."""
        ids: list[int] = []
        for name, length in shape.prefixes:
            if len(ids) >= shape.num_prompt:
                break
            ids.extend(self._piece(name, length))
        ids = ids[: shape.num_prompt]
        return tuple(ids + self._fresh.choices(self._ids, k=shape.num_prompt - len(ids)))

    def _piece(self, name: str, length: int) -> Sequence[int]:
        piece = self._shared.get(name)
        if piece is None or len(piece) < length:
            piece = random.Random(f"{self._salt}/{name}").choices(self._ids, k=length)
            self._shared[name] = piece
        return piece[:length]
