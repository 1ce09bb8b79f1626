"""The domain's value types, shared by gateway and worker; standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from common.window import Window, Windows, max_tokens, narrow, num_held_blocks, widest


class Band(IntEnum):
    """Priority class of a tenant; the smaller number is served first. Values equal the wire's."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


class FinishReason(IntEnum):
    """Why a request ended normally. Values equal the wire's."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3


class JobState(IntEnum):
    """Where a job is; the last three are ends. Values equal the wire's."""

    WAITING = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4
    CANCELLED = 5


class Reason(Enum):
    """Machine-readable cause of an error; names equal the wire's without their prefix."""

    INVALID_PARAMETER = 1
    EMPTY_PROMPT = 2
    PROMPT_TOO_LONG = 3
    INVALID_TOKEN_ID = 4
    NEVER_FITS = 5
    UNKNOWN_MODEL = 6
    MALFORMED_MESSAGE = 7
    TEMPLATE_ERROR = 8
    MISSING_CREDENTIAL = 9
    UNKNOWN_CREDENTIAL = 10
    NOT_ALLOWED = 11
    DUPLICATE_REQUEST_ID = 12
    REQUEST_NOT_FOUND = 13
    REQUEST_RATE = 14
    TOKEN_RATE = 15
    CONCURRENCY = 16
    DAILY_BUDGET = 17
    QUEUE_FULL = 18
    QUEUE_TTL = 19
    DEADLINE = 20
    NO_WORKERS = 21
    NO_CREDIT = 22
    WORKER_LOST = 23
    SLOW_CONSUMER = 24
    DRAINING = 25
    STORE_UNAVAILABLE = 26
    INTERNAL = 27


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when generation ends, validated and with every default filled in.

    Ranges are those of `SamplingParams` in types.proto. Stop strings are not here: they are the gateway's.
    """

    seed: int  # 0 .. 2**64 - 1
    max_tokens: int  # >= 1, never more than the context leaves
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: no log probabilities at all
    ignore_eos: bool = False
    kv_window_tokens: int | None = None  # None: all that the model sees
    kv_sink_tokens: int = 0

    @property
    def window(self) -> Window | None:
        """What a token may see of its own sequence, if that is limited."""
        return None if self.kv_window_tokens is None else Window(self.kv_window_tokens, self.kv_sink_tokens)


GREEDY_TEMPERATURE = 1e-5
"""Below this temperature sampling is greedy: dividing float32 logits by it would overflow."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability under the model, before temperature, penalties and bias."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The sampled token's log probability and the most probable tokens', most probable first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, in tokens."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a worker's model and KV pool allow."""

    model: str
    context_length: int  # tokens, prompt and output together
    vocab_size: int  # rows of the embedding
    block_size: int  # tokens per KV block
    num_blocks: int  # usable by requests in total
    max_num_seqs: int  # running requests at most
    windows: Windows = (None,)  # what the layers of each block table see
    max_chunk_tokens: int = 1  # of one request in a step

    @property
    def max_window_tokens(self) -> int:
        """The widest window that a request can ask for."""
        return min(self.context_length, widest(self.windows) or self.context_length)

    def narrowed(self, window: Window | None) -> Windows:
        """What the layers of each block table see of a request with such a window of its own, or without."""
        return tuple(narrow(own, window) for own in self.windows)

    def num_held_blocks(self, num_tokens: int, window: Window | None) -> int:
        """Blocks that a request of so many tokens holds at a time; in a small pool its chunks are small."""
        windows = self.narrowed(window)
        return min(num_held_blocks(windows, num_tokens, self.max_chunk_tokens, self.block_size), self.num_blocks)

    def max_kv_tokens(self, window: Window | None) -> int:
        """Tokens of one request whose KV fits into the pool, one after the other where there is a window."""
        return max_tokens(self.narrowed(window), self.num_blocks, self.block_size)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """All that a gateway needs to know of a model in order to turn text into tokens and back."""

    limits: ModelLimits
    tokenizer_json: bytes
    chat_template: str  # Jinja; empty if the model has none
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos_token: bool
    bos_token: str
    eos_token: str


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """One attempt of one request."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """A worker's whole KV pool and slots at one moment, and the claims newly contained in these numbers."""

    seq: int
    empty: int
    cached: int
    referenced: int  # or promised to a running request
    swapping: int
    running: int
    waiting: int
    free_slots: int
    accounted: tuple[ClaimRef, ...] = field(default=())

    @property
    def free_blocks(self) -> int:
        """Blocks that a new request could get: empty or evictable."""
        return self.empty + self.cached
