"""What the client takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.types import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, oldest turn first; the model's chat template is applied."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text to go on from."""

    text: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, used as they are."""

    token_ids: Sequence[int]


Prompt = Chat | Text | Tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when generation ends; ranges as in types.proto. None leaves the server's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    kv_window_tokens: int | None = None
    kv_sink_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and its bytes (maybe part of a character)."""

    token_id: int
    logprob: float
    text: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The sampled token's log probability and the most probable tokens', most probable first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations as the gateway saw them, in seconds."""

    queue_s: float  # until a worker took the request
    ttft_s: float  # until the first token; 0 if there was none
    total_s: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is admitted and queued."""

    request_id: str  # for `Client.cancel`
    model: str
    prompt_tokens: int
    seed: int  # repeats the same answer


@dataclass(frozen=True, slots=True)
class Delta:
    """New text; the texts of all deltas, joined, are the answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    offset: int = 0  # output tokens up to here, for `Client.resume`


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer has ended."""

    reason: FinishReason
    usage: Usage
    timing: Timing


Event = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    model: str
    text: str
    reason: FinishReason
    usage: Usage
    timing: Timing
    seed: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens that a prompt takes, and that prompt and answer may take together."""

    num_tokens: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for."""

    name: str
    context_length: int  # tokens
    vocab_size: int  # token ids are below this
    num_workers: int  # ready now
