from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    SlowConsumerError,
    TidegateError,
    UnavailableError,
)
from common.types import FinishReason
from gateway.lifecycle import TRANSITIONS, Lifecycle, RequestState, failed, finished, gone

S = RequestState
ENDS = {S.COMPLETED, S.CANCELLED, S.EXPIRED, S.REJECTED, S.FAILED}


def test_the_table_names_every_state_and_the_ends_are_ends() -> None:
    assert set(TRANSITIONS) == set(S)
    assert {state for state in S if state.is_terminal} == ENDS


def test_every_state_is_reached_and_can_end() -> None:
    reached = {S.RECEIVED}
    while new := {after for before in reached for after in TRANSITIONS[before]} - reached:
        reached |= new
    assert reached == set(S)
    assert all(S.CANCELLED in TRANSITIONS[state] for state in set(S) - ENDS)


def test_a_lost_worker_leads_back_to_the_queue_and_on() -> None:
    life = Lifecycle()
    for state in (S.ADMITTED, S.QUEUED, S.DISPATCHED, S.STREAMING, S.QUEUED, S.DISPATCHED, S.QUEUED):
        life.advance(state)
        assert life.state is state
    assert life.finish(finished(FinishReason.STOP))
    assert life.state is S.COMPLETED


def test_steps_that_are_not_in_the_table_are_refused() -> None:
    life = Lifecycle()
    for state in (S.QUEUED, S.DISPATCHED, S.STREAMING, S.RECEIVED, S.COMPLETED, S.CANCELLED):
        with pytest.raises(ValueError, match="cannot go from received"):
            life.advance(state)
    assert life.state is S.RECEIVED


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (DeadlineExceededError(""), S.EXPIRED),
        (LimitExceededError(""), S.REJECTED),
        (InvalidRequestError(""), S.REJECTED),
        (UnavailableError(""), S.FAILED),
        (SlowConsumerError(""), S.FAILED),
        (InternalError(""), S.FAILED),
    ],
)
def test_an_error_decides_the_kind_of_end(error: TidegateError, state: RequestState) -> None:
    outcome = failed(error)
    assert (outcome.state, outcome.error, outcome.finish_reason) == (state, error, None)


@given(st.lists(st.sampled_from([finished(reason) for reason in FinishReason] + [gone(), failed(InternalError(""))])))
def test_only_the_first_outcome_counts(outcomes: list[Any]) -> None:
    life = Lifecycle()
    for state in (S.ADMITTED, S.QUEUED, S.DISPATCHED, S.STREAMING):
        life.advance(state)
    assert [life.finish(outcome) for outcome in outcomes] == [index == 0 for index in range(len(outcomes))]
    assert life.outcome is (outcomes[0] if outcomes else None)
    assert life.is_ended == bool(outcomes)
    assert life.state.is_terminal == bool(outcomes)


def test_a_refusal_of_a_stream_that_runs_is_a_failure() -> None:
    life = Lifecycle()
    for state in (S.ADMITTED, S.QUEUED, S.DISPATCHED, S.STREAMING):
        life.advance(state)
    life.finish(failed(InvalidRequestError("never fits")))
    assert life.state is S.FAILED
