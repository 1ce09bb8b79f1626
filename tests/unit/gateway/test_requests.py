from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequestError
from common.types import Band, ModelLimits, Reason, SamplingParams
from common.window import Window
from gateway.admission.limits import TenantLimits
from gateway.requests import (
    ChatPrompt,
    SamplingWish,
    TextPrompt,
    TokenPrompt,
    check_prompt,
    check_prompt_length,
    check_request_id,
    check_sampling,
    check_tenant_context,
    effective_band,
    resolve_sampling,
)

LIMITS = ModelLimits("m", context_length=100, vocab_size=50, block_size=16, num_blocks=10, max_num_seqs=4)

anything = st.floats(width=32) | st.none()
counts = st.integers(0, 2**32 - 1) | st.none()
wishes = st.builds(
    SamplingWish,
    temperature=anything,
    top_k=st.integers(-(2**31), 2**31 - 1) | st.none(),
    top_p=anything,
    min_p=anything,
    repetition_penalty=anything,
    presence_penalty=anything,
    frequency_penalty=anything,
    seed=st.integers(0, 2**64 - 1) | st.none(),
    max_tokens=counts,
    min_tokens=st.integers(0, 20) | st.none(),
    stop_token_ids=st.lists(st.integers(0, 60), max_size=3).map(tuple),
    stop=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    logit_bias=st.lists(st.tuples(st.integers(0, 60), st.floats(width=32)), max_size=2).map(tuple),
    logprobs=counts,
    kv_window_tokens=st.integers(0, 120) | st.none(),
    kv_sink_tokens=st.integers(0, 120) | st.none(),
)


@given(wishes, st.integers(1, 99))
def test_whatever_passes_is_in_range(wish: SamplingWish, num_prompt_tokens: int) -> None:
    try:
        check_sampling(wish, LIMITS)
    except InvalidRequestError:
        return
    params = resolve_sampling(wish, LIMITS, num_prompt_tokens, lambda: 7)
    assert 1 <= params.max_tokens <= 100 - num_prompt_tokens
    assert 0 <= params.min_tokens <= params.max_tokens
    assert 0 <= params.temperature <= 100
    assert 0 <= params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert params.top_k >= 0
    assert 0 < params.repetition_penalty <= 10
    assert -2 <= params.presence_penalty <= 2
    assert -2 <= params.frequency_penalty <= 2
    assert params.logprobs is None or 0 <= params.logprobs <= 20
    assert all(token_id < 50 for token_id in params.stop_token_ids)
    assert all(token_id < 50 and abs(bias) <= 100 for token_id, bias in params.logit_bias)
    window = params.window
    assert window is None or (1 <= window.num_tokens <= 100 and 0 <= window.num_sinks <= window.num_tokens)
    assert params.seed == (7 if wish.seed is None else wish.seed)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, -1e9])
def test_what_is_no_number_in_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling(dataclasses.replace(SamplingWish(), **{name: value}), LIMITS)
    assert caught.value.fields[0].field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("window", "sinks", "own", "field", "allowed"),
    [
        (0, None, None, "kv_window_tokens", "1 to 100"),
        (101, None, None, "kv_window_tokens", "1 to 100"),
        (65, None, Window(64), "kv_window_tokens", "1 to 64"),
        (None, 4, None, "kv_sink_tokens", "unset without kv_window_tokens"),
        (20, 21, None, "kv_sink_tokens", "0 to kv_window_tokens, 20"),
    ],
)
def test_a_window_out_of_range_is_refused(
    window: int | None, sinks: int | None, own: Window | None, field: str, allowed: str
) -> None:
    limits = dataclasses.replace(LIMITS, windows=(own,))
    with pytest.raises(InvalidRequestError, match=allowed) as caught:
        check_sampling(SamplingWish(kv_window_tokens=window, kv_sink_tokens=sinks), limits)
    assert caught.value.fields[0].field == f"sampling.{field}"


@pytest.mark.parametrize(("window", "sinks", "kept"), [(100, None, 4), (3, None, 3), (20, 0, 0), (20, 20, 20)])
def test_the_first_tokens_stay_visible_unless_told_otherwise(window: int, sinks: int | None, kept: int) -> None:
    wish = SamplingWish(kv_window_tokens=window, kv_sink_tokens=sinks)
    check_sampling(wish, dataclasses.replace(LIMITS, windows=(None, Window(10))))  # some layer sees everything
    assert resolve_sampling(wish, LIMITS, 40, lambda: 9).window == Window(window, kept)


def test_an_empty_wish_takes_every_default() -> None:
    check_sampling(SamplingWish(), LIMITS)
    assert resolve_sampling(SamplingWish(), LIMITS, 40, lambda: 9) == SamplingParams(seed=9, max_tokens=60)


def test_the_prompt_must_leave_room_for_one_token() -> None:
    check_prompt_length(99, LIMITS)
    for count in (100, 101):
        with pytest.raises(InvalidRequestError, match=f"has {count} tokens.*100 tokens.*at most 99") as caught:
            check_prompt_length(count, LIMITS)
        assert caught.value.reason is Reason.PROMPT_TOO_LONG


@pytest.mark.parametrize("prompt", [None, ChatPrompt(()), TextPrompt(""), TokenPrompt(())])
def test_nothing_to_go_on_from(prompt: ChatPrompt | TextPrompt | TokenPrompt | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt(prompt, LIMITS)
    assert caught.value.reason is Reason.EMPTY_PROMPT


@pytest.mark.parametrize(("token_id", "is_allowed"), [(0, True), (49, True), (50, False), (2**32 - 1, False)])
def test_token_ids_lie_inside_the_vocabulary(token_id: int, is_allowed: bool) -> None:
    prompt = TokenPrompt((1, token_id, 2))
    if is_allowed:
        assert check_prompt(prompt, LIMITS) is prompt
        return
    with pytest.raises(InvalidRequestError, match="below 50") as caught:
        check_prompt(prompt, LIMITS)
    assert caught.value.reason is Reason.INVALID_TOKEN_ID


@given(st.text(max_size=140))
def test_request_ids_are_of_a_small_alphabet(request_id: str) -> None:
    allowed = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-")
    is_allowed = len(request_id) <= 128 and set(request_id) <= allowed
    try:
        check_request_id(request_id)
    except InvalidRequestError:
        assert not is_allowed
    else:
        assert is_allowed


@pytest.mark.parametrize("tenant_band", Band)
@pytest.mark.parametrize("wished", [None, *Band])
def test_a_band_is_lowered_and_never_raised(tenant_band: Band, wished: Band | None) -> None:
    band = effective_band(tenant_band, wished)
    assert band >= tenant_band
    assert band == max(tenant_band, wished or tenant_band)


@pytest.mark.parametrize(
    ("limits", "wished", "granted"),
    [
        (TenantLimits(max_output=20), None, 20),
        (TenantLimits(max_output=20), 30, 20),
        (TenantLimits(max_output=20), 10, 10),
        (TenantLimits(max_output=80), None, 60),
        (TenantLimits(max_context=50), None, 10),
        (TenantLimits(tokens_per_minute=45, max_context=50), 30, 5),
        (TenantLimits(tokens_per_day=30), None, 1),
    ],
)
def test_output_is_cut_to_what_the_tenant_may_have(limits: TenantLimits, wished: int | None, granted: int) -> None:
    assert resolve_sampling(SamplingWish(max_tokens=wished), LIMITS, 40, lambda: 9, limits).max_tokens == granted


def test_a_prompt_over_the_tenants_context_is_told_how_long_it_may_be() -> None:
    check_tenant_context(49, TenantLimits(max_context=50))
    check_tenant_context(10**6, TenantLimits())
    with pytest.raises(InvalidRequestError, match=r"has 50 tokens.*at most 49") as caught:
        check_tenant_context(50, TenantLimits(max_context=50))
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
