"""The engine over a fake executor: results, refusals, ends, aborts, failures, and what sessions are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.errors import DuplicateRequestError, InvalidRequestError, LimitExceededError, UnavailableError
from common.types import ClaimRef, FinishReason, ModelLimits, Reason, SamplingParams
from tests.support.fake_executor import FakeExecutor, generate
from tests.unit.worker.engine.rig import SESSION, VOCAB_SIZE, EngineRig, reason_of
from worker.engine.engine import MAX_FAILED_STEPS, MAX_WAITING, Engine
from worker.engine.executor import ExecutionError, SamplingError


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return generate(prompt, num_tokens, vocab_size=VOCAB_SIZE)


# Lengths


@pytest.mark.parametrize("length", range(1, 14))
def test_a_prompt_around_multiples_of_the_block_size_gives_the_same_cold_and_cached(length: int) -> None:
    rig = EngineRig(num_blocks=8)
    prompt = list(range(length))
    for request_id in ("cold", "cached"):
        rig.submit(request_id, prompt, 6)
        rig.run()
        rig.assert_generated(request_id, prompt, 6)
    assert rig.of("cached").cached_prompt_tokens == [(length - 1) // 4 * 4, 0, 0, 0, 0, 0]
    rig.assert_idle()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("max_chunk", [1, 3, 16])
def test_any_block_and_chunk_size_gives_the_same(block_size: int, max_chunk: int) -> None:
    rig = EngineRig(num_blocks=80, block_size=block_size, max_chunk=max_chunk)
    prompts = {f"r{index}": list(range(index, index + 5 * index + 1)) for index in range(4)}
    for request_id, prompt in prompts.items():
        rig.submit(request_id, prompt, 7)
    rig.run()
    for request_id, prompt in prompts.items():
        rig.assert_generated(request_id, prompt, 7)


@pytest.mark.parametrize(("length", "fits"), [(10, True), (11, True), (12, False), (13, False)])
def test_a_prompt_fits_if_the_pool_holds_it_and_one_more_token(length: int, fits: bool) -> None:
    rig = EngineRig(num_blocks=3)
    if not fits:
        with pytest.raises(InvalidRequestError, match=r"need 4 KV blocks of 4 tokens; the pool has 3") as caught:
            rig.submit("r", list(range(length)), 1)
        assert caught.value.reason is Reason.NEVER_FITS
        assert not rig.scheduler.has_requests
    else:
        rig.submit("r", list(range(length)), 1)
        rig.run()
        rig.assert_generated("r", list(range(length)), 1)


def test_the_request_after_one_that_never_fits_is_served() -> None:
    rig = EngineRig(num_blocks=3)
    with pytest.raises(InvalidRequestError):
        rig.submit("big", list(range(50)))
    rig.submit("small", [1, 2], 2)
    rig.run()
    rig.assert_generated("small", [1, 2], 2)


@pytest.mark.parametrize("length", range(1, 12))
def test_a_lone_request_that_outgrows_the_pool_ends_by_length(length: int) -> None:
    rig = EngineRig(num_blocks=3)
    prompt = list(range(length))
    rig.submit("r", prompt, 100)
    rig.run()
    rig.assert_generated("r", prompt, 13 - length)  # 12 tokens' KV fits; the last token needs none
    assert not any(stats.num_preemptions for stats in rig.stats)
    rig.assert_idle()


def test_the_context_length_ends_a_request() -> None:
    rig = EngineRig(context_length=10)
    rig.submit("r", [1] * 7, 100)
    rig.run()
    rig.assert_generated("r", [1] * 7, 3)


def test_a_prompt_that_fills_the_context_is_refused_and_not_cut() -> None:
    rig = EngineRig(context_length=10)
    with pytest.raises(InvalidRequestError, match="context holds 10") as caught:
        rig.submit("r", [1] * 10)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, Reason.EMPTY_PROMPT),
        ([1], {"max_tokens": 0}, Reason.INVALID_PARAMETER),
        ([1], {"min_tokens": 9}, Reason.INVALID_PARAMETER),
        ([VOCAB_SIZE], {}, Reason.INVALID_TOKEN_ID),
        ([-1], {}, Reason.INVALID_TOKEN_ID),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, Reason.INVALID_TOKEN_ID),
        ([1], {"logit_bias": ((VOCAB_SIZE, 1.0),)}, Reason.INVALID_TOKEN_ID),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(prompt: list[int], sampling: dict[str, Any], reason: Reason) -> None:
    rig = EngineRig()
    params = replace(SamplingParams(seed=1, max_tokens=8), **sampling)
    with pytest.raises(InvalidRequestError) as caught:
        rig.engine.submit(SESSION, "r", 1, prompt, params)
    assert caught.value.reason is reason
    assert not rig.scheduler.has_requests


# Ends


def test_an_end_token_ends_and_is_reported_and_ignore_eos_ignores_it() -> None:
    third = expected([1, 2], 3)[2]
    rig = EngineRig(eos_token_ids=[third])
    rig.submit("stops", [1, 2], 8)
    rig.submit("ignores", [1, 2], 8, sampling={"ignore_eos": True})
    rig.run()
    assert rig.of("stops").token_ids == expected([1, 2], 3)
    assert rig.of("stops").finish_reason is FinishReason.STOP
    rig.assert_generated("ignores", [1, 2], 8)


def test_a_stop_token_id_ends_also_where_end_tokens_are_ignored() -> None:
    tokens = expected([1, 2], 4)
    rig = EngineRig(eos_token_ids=[tokens[1]])
    rig.submit("r", [1, 2], 8, sampling={"ignore_eos": True, "stop_token_ids": (tokens[3], 5)})
    rig.run()
    assert rig.of("r").token_ids == tokens
    assert rig.of("r").finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 3), (2, 3), (3, 8), (4, 8)])
def test_no_stop_before_min_tokens(min_tokens: int, num_tokens: int) -> None:
    rig = EngineRig(eos_token_ids=[expected([1, 2], 3)[2]])
    rig.submit("r", [1, 2], 8, sampling={"min_tokens": min_tokens})
    rig.run()
    assert len(rig.of("r").token_ids) == num_tokens


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    rig = EngineRig(eos_token_ids=[expected([1, 2], 3)[2]])
    rig.submit("r", [1, 2], 3)
    rig.run()
    assert rig.of("r").finish_reason is FinishReason.STOP


# Resumed requests


@pytest.mark.parametrize("num_known", range(1, 8))
def test_a_request_continued_from_delivered_tokens_gives_the_rest(num_known: int) -> None:
    tokens = expected([1, 2, 3], 8)
    rig = EngineRig()
    rig.submit("r", [1, 2, 3], 8, attempt=2, output_token_ids=tokens[:num_known])
    rig.run()
    assert rig.of("r", attempt=2).token_ids == tokens[num_known:]


def test_known_output_counts_for_min_tokens_and_never_as_cached_prompt() -> None:
    tokens = expected([1, 2, 3], 8)
    rig = EngineRig(eos_token_ids=[tokens[5]])
    rig.submit("first", [1, 2, 3], 8, sampling={"min_tokens": 5})
    rig.run()
    rig.submit("r", [1, 2, 3], 8, output_token_ids=tokens[:5], sampling={"min_tokens": 5})
    rig.run()
    assert rig.of("r").token_ids == [tokens[5]]
    assert rig.of("r").finish_reason is FinishReason.STOP
    assert rig.of("r").cached_prompt_tokens == [3], "only the prompt's tokens, though the hit covers four"


def test_a_request_with_nothing_left_to_generate_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="nothing is left"):
        EngineRig().submit("r", [1], 2, output_token_ids=[1, 2])


# Names


def test_a_duplicate_is_refused_and_the_first_lives() -> None:
    rig = EngineRig()
    rig.submit("r", [1, 2], 4)
    with pytest.raises(DuplicateRequestError):
        rig.submit("r", [3, 4], 4)
    rig.run()
    rig.assert_generated("r", [1, 2], 4)
    rig.submit("r", [1, 2], 4)  # the name is free again
    rig.run()
    rig.assert_generated("r", [1, 2], 4)


def test_a_late_abort_of_one_attempt_does_not_touch_another_nor_another_session() -> None:
    rig = EngineRig()
    rig.engine.open_session(2)
    rig.submit("r", [1, 2], 4)
    rig.run()
    rig.submit("r", [1, 2], 4, attempt=2)
    rig.submit("r", [1, 2], 4, session_id=2)
    rig.step()
    assert not rig.abort("r", attempt=1)
    assert not rig.abort("r", attempt=2, session_id=2)
    assert not rig.abort("r", session_id=3)
    rig.run()
    assert rig.of("r", attempt=2).finish_reason is FinishReason.LENGTH
    assert rig.of("r", session_id=2).finish_reason is FinishReason.LENGTH


def test_a_submit_to_a_session_that_is_over_is_refused() -> None:
    rig = EngineRig()
    rig.engine.abort_session(SESSION)
    with pytest.raises(UnavailableError):
        rig.submit("r", [1])
    rig.engine.reject(SESSION, "r", 1, Reason.NO_CREDIT, "nobody is there to hear it")
    rig.run()


# Aborts


@pytest.mark.parametrize("num_steps", range(12))
def test_abort_at_any_step_gives_one_terminal_event_and_frees_everything(num_steps: int) -> None:
    rig = EngineRig(num_blocks=12, max_chunk=3)
    rig.submit("r", list(range(10)), 6)
    rig.submit("other", list(range(5)), 12)
    for _ in range(num_steps):
        rig.step()
    was_there = not rig.of("r").is_ended
    tokens = list(rig.of("r").token_ids)
    assert rig.abort("r") is was_there
    assert not rig.abort("r")
    rig.run()
    assert rig.of("r").token_ids == tokens, "not a token after the abort"
    assert (rig.of("r").finish_reason is FinishReason.CANCELLED) is was_there
    rig.assert_generated("other", list(range(5)), 12)
    rig.assert_idle()


def test_abort_while_preempted() -> None:
    rig = EngineRig(num_blocks=6)
    rig.submit("early", [1] * 8, 12)
    rig.submit("late", [2] * 8, 12)
    while not rig.scheduler.waiting.num_returning:
        rig.step()
    assert rig.abort("late")
    rig.run()
    rig.assert_generated("early", [1] * 8, 12)
    assert rig.of("late").finish_reason is FinishReason.CANCELLED
    rig.assert_idle()


def test_a_session_that_ends_takes_its_requests_along_and_nobody_elses() -> None:
    rig = EngineRig(max_num_seqs=2)
    rig.engine.open_session(2)
    for index in range(3):
        rig.submit(f"a{index}", [index] * 5, 6)
        rig.submit(f"b{index}", [index] * 5, 6, session_id=2)
    for _ in range(2):
        rig.step()
    rig.engine.abort_session(SESSION)
    told = rig.usage[SESSION]
    rig.run()
    assert rig.usage[SESSION] is told
    assert not any(rig.of(f"a{index}").is_ended for index in range(3))
    assert all(rig.of(f"b{index}", session_id=2).finish_reason is FinishReason.LENGTH for index in range(3))
    assert rig.pool.counts.referenced == 0


# Room


def test_the_waiting_list_is_bounded_and_says_so() -> None:
    rig = EngineRig(max_num_seqs=2)
    for index in range(2 + MAX_WAITING):
        rig.submit(f"r{index}", [index], 2)
    with pytest.raises(LimitExceededError, match=f"takes at most {2 + MAX_WAITING}") as caught:
        rig.submit("one too many", [1], 2)
    assert caught.value.reason is Reason.NO_CREDIT
    rig.run()
    for index in range(2 + MAX_WAITING):
        rig.assert_generated(f"r{index}", [index], 2)


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.submit("running", [1, 2], 4)
    rig.submit("waiting", [3, 4], 4)
    rig.step()
    rig.engine.drain()
    with pytest.raises(UnavailableError) as caught:
        rig.submit("new", [1])
    assert caught.value.reason is Reason.DRAINING
    rig.run()
    rig.assert_generated("running", [1, 2], 4)
    rig.assert_generated("waiting", [3, 4], 4)
    assert rig.usage[SESSION].free_slots == 0


def test_limits_that_promise_more_than_there_is_stop_the_start() -> None:
    rig = EngineRig(num_blocks=8)
    limits = ModelLimits("fake", 100, VOCAB_SIZE, block_size=4, num_blocks=9, max_num_seqs=4)
    with pytest.raises(ValueError, match=r"\(4, 9, 4, .*\) in the limits, \(4, 8, 4, "):
        Engine(rig.executor, rig.scheduler, rig.manager, limits, [])
    with pytest.raises(ValueError, match="executor has"):
        Engine(FakeExecutor(10, 4), rig.scheduler, rig.manager, replace(limits, num_blocks=8), [])


# Failures


def test_a_failed_step_ends_its_requests_and_the_engine_lives() -> None:
    rig = EngineRig(max_num_seqs=2)
    for index in range(3):
        rig.submit(f"r{index}", [index] * 3, 4)
    rig.step()
    rig.executor.error = ExecutionError("out of memory")
    rig.step()
    assert [reason_of(rig.of(f"r{index}")) for index in range(3)] == [Reason.INTERNAL, Reason.INTERNAL, None]
    rig.run()
    rig.assert_generated("r2", [2] * 3, 4)
    rig.assert_idle()


def test_blocks_of_a_failed_step_are_not_hittable() -> None:
    rig = EngineRig()
    rig.submit("fails", list(range(12)), 4)
    rig.executor.error = ExecutionError("out of memory")
    rig.step()
    assert rig.pool.counts.cached == 0
    rig.submit("r", list(range(12)), 4)
    rig.run()
    rig.assert_generated("r", list(range(12)), 4)
    assert rig.of("r").cached_prompt_tokens[0] == 0


def test_a_row_that_cannot_be_sampled_ends_alone() -> None:
    rig = EngineRig()
    for index in range(3):
        rig.submit(f"r{index}", [index] * 3, 4)
    rig.step()
    rig.executor.error = SamplingError({1: "all logits are NaN"})
    rig.step()
    rejected = rig.of("r1").rejected
    assert rejected is not None
    assert (rejected.reason, rejected.message) == (Reason.INTERNAL, "all logits are NaN")
    rig.run()
    rig.assert_generated("r0", [0] * 3, 4)
    rig.assert_generated("r2", [2] * 3, 4)
    rig.assert_idle()


def test_an_executor_that_fails_again_and_again_is_broken() -> None:
    rig = EngineRig()
    for index in range(MAX_FAILED_STEPS - 1):
        rig.submit(f"r{index}", [1], 4)
        rig.executor.error = ExecutionError("no device")
        rig.step()
    rig.submit("last", [1], 4)
    rig.executor.error = ExecutionError("no device")
    with pytest.raises(ExecutionError, match="no device"):
        rig.step()


def test_a_good_step_forgives_failed_ones() -> None:
    rig = EngineRig()
    for index in range(3 * MAX_FAILED_STEPS):
        rig.submit(f"r{index}", [1], 4)
        rig.executor.error = ExecutionError("a glitch") if index % MAX_FAILED_STEPS else None
        rig.step()


# Block usage


def test_a_new_session_is_told_the_usage_at_once_and_then_only_changes() -> None:
    rig = EngineRig(num_blocks=8)
    assert rig.engine.has_work
    rig.step()
    usage = rig.usage.pop(SESSION)
    assert (usage.empty, usage.cached, usage.referenced, usage.free_slots) == (8, 0, 0, 4)
    assert not rig.engine.has_work
    rig.step()
    assert SESSION not in rig.usage


def test_every_session_is_told_and_the_number_grows_with_every_change() -> None:
    rig = EngineRig(num_blocks=8)
    rig.engine.open_session(2)
    rig.submit("r", [1] * 6, 8)
    last = 0
    while rig.engine.has_work:
        rig.step()
        assert rig.usage[1].seq == rig.usage[2].seq >= last
        last = rig.usage[1].seq
        assert rig.usage[1].empty + rig.usage[1].cached + rig.usage[1].referenced == 8
    assert rig.accounted == {1: [ClaimRef("r", 1)], 2: []}


def test_a_claim_is_accounted_for_once_when_its_blocks_are_in_the_numbers() -> None:
    rig = EngineRig(num_blocks=8, max_num_seqs=1)
    rig.submit("first", [1] * 6, 4)
    rig.submit("second", [2] * 6, 4)
    rig.step()
    assert rig.accounted[SESSION] == [ClaimRef("first", 1)]
    assert (rig.usage[SESSION].referenced, rig.usage[SESSION].waiting, rig.usage[SESSION].free_slots) == (2, 1, 0)
    rig.run()
    assert rig.accounted[SESSION] == [ClaimRef("first", 1), ClaimRef("second", 1)]


def test_a_claim_that_ends_before_it_is_admitted_is_accounted_for() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.submit("first", [1] * 6, 4)
    rig.submit("second", [2] * 6, 4)
    rig.step()
    rig.abort("second")
    rig.step()
    assert rig.accounted[SESSION] == [ClaimRef("first", 1), ClaimRef("second", 1)]


def test_a_claim_is_accounted_for_even_if_it_came_and_went_without_changing_the_numbers() -> None:
    rig = EngineRig()
    rig.step()
    before = rig.usage[SESSION]
    rig.submit("r", [1], 1)
    rig.step()
    assert rig.usage[SESSION] == replace(before, accounted=(ClaimRef("r", 1),))


def test_a_preempted_request_is_not_accounted_for_again_and_closes_the_door() -> None:
    rig = EngineRig(num_blocks=6)
    rig.submit("early", [1] * 8, 12)
    rig.submit("late", [2] * 8, 12)
    while not rig.scheduler.waiting.num_returning:
        rig.step()
    assert rig.usage[SESSION].free_slots == 0
    rig.run()
    assert rig.accounted[SESSION] == [ClaimRef("early", 1), ClaimRef("late", 1)]
    assert rig.usage[SESSION].free_slots == 4
