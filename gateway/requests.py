"""What a client asks for, checked field by field against the model's limits; no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from common.errors import InvalidRequestError
from common.types import Band, ModelLimits, Reason, SamplingParams
from common.window import DEFAULT_SINKS
from gateway.admission.limits import NO_LIMITS, TenantLimits

_T = TypeVar("_T")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_STOP_TOKEN_IDS = 64
_MAX_STOP_STRINGS = 16
_MAX_STOP_CHARACTERS = 256
_MAX_LOGIT_BIAS = 1024
_MAX_LOGPROBS = 20
_MAX_ROLE_CHARACTERS = 64
_MAX_KEY_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation: (role, content) pairs, oldest first."""

    messages: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text to go on from."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """Sampling as the client sent it; None is unset. Ranges are those of `SamplingParams` in types.proto."""

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
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    kv_window_tokens: int | None = None
    kv_sink_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One wish for an answer."""

    request_id: str  # empty: the gateway chooses
    model: str  # empty: the default one
    prompt: Prompt | None
    sampling: SamplingWish
    band: Band | None  # None: the tenant's
    return_token_ids: bool
    is_resumable: bool = False
    idempotency_key: str = ""  # empty: none


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError unless it is empty or well formed."""
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError.of_field("request_id", "must be 1 to 128 of [A-Za-z0-9._:-], or empty")


def check_idempotency_key(call: GenerateCall) -> None:
    """Raises InvalidRequestError unless the call has no key, or a good one and no id of its own."""
    if len(call.idempotency_key) > _MAX_KEY_CHARACTERS:
        raise InvalidRequestError.of_field("idempotency_key", f"must have at most {_MAX_KEY_CHARACTERS} characters")
    if call.idempotency_key and call.request_id:
        raise InvalidRequestError.of_field("request_id", "must be empty with an idempotency_key, which decides it")


def check_prompt(prompt: Prompt | None, limits: ModelLimits) -> Prompt:
    """The prompt, if it has something in it and all its ids exist. Raises InvalidRequestError."""
    match prompt:
        case None:
            raise _empty("prompt", "one of chat, text and tokens must be set")
        case ChatPrompt(messages):
            if not messages:
                raise _empty("chat.messages", "is empty; at least one message is needed")
            for index, (role, _) in enumerate(messages):
                if not role or len(role) > _MAX_ROLE_CHARACTERS:
                    raise InvalidRequestError.of_field(
                        f"chat.messages[{index}].role", f"must have 1 to {_MAX_ROLE_CHARACTERS} characters"
                    )
        case TextPrompt(text):
            if not text:
                raise _empty("text", "is empty; at least one character is needed")
        case TokenPrompt(token_ids):
            if not token_ids:
                raise _empty("tokens.token_ids", "is empty; at least one id is needed")
            # Length first: it is the cheaper check, and bounds the other one.
            check_prompt_length(len(token_ids), limits)
            _check_ids("tokens.token_ids", token_ids, limits)
    return prompt


def check_prompt_length(num_tokens: int, limits: ModelLimits, *, is_lower_bound: bool = False) -> None:
    """Raises InvalidRequestError(PROMPT_TOO_LONG) unless the context leaves room for one token after the prompt."""
    if num_tokens >= limits.context_length:
        quantity = f"at least {num_tokens}" if is_lower_bound else str(num_tokens)
        message = (
            f"prompt has {quantity} tokens; the context of {limits.model} is {limits.context_length} tokens, "
            f"so a prompt may have at most {limits.context_length - 1}"
        )
        raise InvalidRequestError.of_field("prompt", message, Reason.PROMPT_TOO_LONG)


def check_tenant_context(num_tokens: int, limits: TenantLimits) -> None:
    """Raises InvalidRequestError(PROMPT_TOO_LONG) unless the tenant's context leaves room for one token of output."""
    if limits.max_context is not None and num_tokens >= limits.max_context:
        message = (
            f"prompt has {num_tokens} tokens; requests of this tenant may have {limits.max_context} tokens, "
            f"so a prompt may have at most {limits.max_context - 1}"
        )
        raise InvalidRequestError.of_field("prompt", message, Reason.PROMPT_TOO_LONG)


def check_sampling(wish: SamplingWish, limits: ModelLimits) -> None:
    """Raises InvalidRequestError for the first field that is out of its range."""
    _check_range("temperature", wish.temperature, 0.0, 100.0)
    _check_range("top_p", wish.top_p, 0.0, 1.0)
    _check_range("min_p", wish.min_p, 0.0, 1.0)
    _check_range("presence_penalty", wish.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", wish.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", wish.repetition_penalty, 0.0, 10.0, excludes_low=True)
    if wish.top_k is not None and wish.top_k < 0:
        raise _bad("top_k", f"is {wish.top_k}; must be at least 0 (0 keeps all tokens)")
    if wish.max_tokens is not None and wish.max_tokens < 1:
        raise _bad("max_tokens", "is 0; must be at least 1")
    if wish.min_tokens is not None:
        most = limits.context_length if wish.max_tokens is None else wish.max_tokens
        if wish.min_tokens > most:
            raise _bad("min_tokens", f"is {wish.min_tokens}; must be at most max_tokens, {most}")
    if wish.logprobs is not None and wish.logprobs > min(_MAX_LOGPROBS, limits.vocab_size):
        raise _bad("logprobs", f"is {wish.logprobs}; must be 0 to {min(_MAX_LOGPROBS, limits.vocab_size)}")
    _check_window(wish, limits)
    _check_count("stop_token_ids", len(wish.stop_token_ids), _MAX_STOP_TOKEN_IDS)
    _check_ids("sampling.stop_token_ids", wish.stop_token_ids, limits)
    _check_count("stop", len(wish.stop), _MAX_STOP_STRINGS)
    for index, text in enumerate(wish.stop):
        if not 1 <= len(text) <= _MAX_STOP_CHARACTERS:
            raise _bad(f"stop[{index}]", f"has {len(text)} characters; must have 1 to {_MAX_STOP_CHARACTERS}")
    _check_count("logit_bias", len(wish.logit_bias), _MAX_LOGIT_BIAS)
    _check_ids("sampling.logit_bias", (token_id for token_id, _ in wish.logit_bias), limits)
    for token_id, bias in wish.logit_bias:
        _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def resolve_sampling(
    wish: SamplingWish,
    limits: ModelLimits,
    num_prompt_tokens: int,
    choose_seed: Callable[[], int],
    tenant_limits: TenantLimits = NO_LIMITS,
) -> SamplingParams:
    """A checked wish with every default filled in, and max_tokens cut to what context and tenant allow."""
    room = limits.context_length - num_prompt_tokens
    if tenant_limits.max_request_tokens is not None:
        room = min(room, tenant_limits.max_request_tokens - num_prompt_tokens)
    if tenant_limits.max_output is not None:
        room = min(room, tenant_limits.max_output)
    room = max(room, 1)  # a prompt that alone is over a rate limit is refused by that limit
    max_tokens = room if wish.max_tokens is None else min(wish.max_tokens, room)
    return SamplingParams(
        seed=choose_seed() if wish.seed is None else wish.seed,
        max_tokens=max_tokens,
        temperature=_or(wish.temperature, 1.0),
        top_k=_or(wish.top_k, 0),
        top_p=_or(wish.top_p, 1.0),
        min_p=_or(wish.min_p, 0.0),
        repetition_penalty=_or(wish.repetition_penalty, 1.0),
        presence_penalty=_or(wish.presence_penalty, 0.0),
        frequency_penalty=_or(wish.frequency_penalty, 0.0),
        min_tokens=min(_or(wish.min_tokens, 0), max_tokens),
        stop_token_ids=wish.stop_token_ids,
        logit_bias=wish.logit_bias,
        logprobs=wish.logprobs,
        ignore_eos=wish.ignore_eos,
        kv_window_tokens=wish.kv_window_tokens,
        kv_sink_tokens=_or(wish.kv_sink_tokens, min(DEFAULT_SINKS, wish.kv_window_tokens or 0)),
    )


def effective_band(tenant_band: Band, wished: Band | None) -> Band:
    """The tenant's band, or a lower one if the client asks for it."""
    return tenant_band if wished is None else max(tenant_band, wished)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _bad(name: str, description: str) -> InvalidRequestError:
    return InvalidRequestError.of_field(f"sampling.{name}", description)


def _empty(name: str, description: str) -> InvalidRequestError:
    return InvalidRequestError.of_field(name, description, Reason.EMPTY_PROMPT)


def _check_window(wish: SamplingWish, limits: ModelLimits) -> None:
    window, sinks = wish.kv_window_tokens, wish.kv_sink_tokens
    if window is not None and not 1 <= window <= limits.max_window_tokens:
        what = f"is {window}; must be 1 to {limits.max_window_tokens}, which is all that {limits.model} sees"
        raise _bad("kv_window_tokens", what)
    if sinks is not None and window is None:
        raise _bad("kv_sink_tokens", f"is {sinks}; must be unset without kv_window_tokens")
    if sinks is not None and window is not None and sinks > window:
        raise _bad("kv_sink_tokens", f"is {sinks}; must be 0 to kv_window_tokens, {window}")


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise _bad(name, f"has {count} entries; at most {most} are allowed")


def _check_range(name: str, value: float | None, low: float, high: float, *, excludes_low: bool = False) -> None:
    if value is None:
        return
    is_inside = math.isfinite(value) and low <= value <= high and not (excludes_low and value == low)
    if not is_inside:
        bounds = f"above {low:g} to {high:g}" if excludes_low else f"{low:g} to {high:g}"
        raise _bad(name, f"is {value:g}; must be {bounds}")


def _check_ids(name: str, token_ids: Iterable[int], limits: ModelLimits) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise InvalidRequestError.of_field(
            name, f"has id {largest}; ids of {limits.model} are below {limits.vocab_size}", Reason.INVALID_TOKEN_ID
        )
