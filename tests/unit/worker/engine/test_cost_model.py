"""The cost model: it finds the costs that steps have, keeps what it is not shown, and its inverse is right."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.window import Window
from worker.engine.budget import TimeBudget, TokenBudget
from worker.engine.config import SchedulerConfig
from worker.engine.cost_model import CostModel, StepLoad, chunk_kv_tokens

TRUE = (0.012, 0.0004, 2e-7, 0.0001)  # seconds per step, token, KV token, row


def true_s(load: StepLoad) -> float:
    return TRUE[0] + TRUE[1] * load.num_tokens + TRUE[2] * load.num_kv_tokens + TRUE[3] * load.num_rows


def random_load(rng: random.Random) -> StepLoad:
    rows = rng.randint(1, 64)
    return StepLoad(rows + rng.choice([0, 0, rng.randint(1, 200)]), rng.randint(rows, 40_000), rows)


def fitted(num_steps: int = 400, noise: float = 0.0, seed: int = 1) -> CostModel:
    model, rng = CostModel(), random.Random(seed)
    for _ in range(num_steps):
        load = random_load(rng)
        model.observe(load, true_s(load) * (1 + noise * rng.uniform(-1, 1)))
    return model


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.2, 0.1)])
def test_it_predicts_steps_it_has_not_seen(noise: float, tolerance: float) -> None:
    model, rng = fitted(noise=noise), random.Random(2)
    for _ in range(50):
        load = random_load(rng)
        assert model.predict(load) == pytest.approx(true_s(load), rel=tolerance)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model, rng = fitted(), random.Random(3)
    for _ in range(1500):
        load = random_load(rng)
        model.observe(load, 3 * true_s(load))
    assert model.predict(StepLoad(80, 9000, 40)) == pytest.approx(3 * true_s(StepLoad(80, 9000, 40)), rel=0.05)


def test_a_pause_of_the_machine_is_not_learned_as_the_cost_of_the_work() -> None:
    model, load = fitted(), StepLoad(40, 9000, 40)
    model.observe(load, 30.0)
    assert model.predict(load) < 1.1 * true_s(load)


def test_what_a_chunk_costs_is_not_forgotten_while_only_decodes_run() -> None:
    model = fitted()
    before = model.chunk_s(0, 64, is_new_row=True)
    for step in range(2000):
        load = StepLoad(32, 32 * 500 + step % 50, 32)
        model.observe(load, true_s(load))
    assert model.chunk_s(0, 64, is_new_row=True) == pytest.approx(before, rel=0.3)


def test_the_first_steps_are_small_before_anything_is_measured() -> None:
    assert 16 <= CostModel().num_affordable(0, 0.05, is_new_row=True) <= 200


@given(
    loads=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 10**6), st.integers(0, 300), st.floats(0, 5)), max_size=30
    ),
    start=st.integers(0, 8000),
    seconds=st.floats(-1, 1),
)
def test_no_measurement_makes_a_cost_negative_and_the_inverse_is_exact(
    loads: list[tuple[int, int, int, float]], start: int, seconds: float
) -> None:
    model = CostModel()
    for tokens, kv_tokens, rows, taken in loads:
        model.observe(StepLoad(tokens, kv_tokens, rows), taken)
    assert model.predict(StepLoad(0, 0, 0)) >= 0
    assert model.chunk_s(start, 10, is_new_row=True) >= model.chunk_s(start, 9, is_new_row=False) >= 0
    count = model.num_affordable(start, seconds, is_new_row=True)
    if 0 < count < 1 << 31:
        assert model.chunk_s(start, count, is_new_row=True) <= seconds * (1 + 1e-6)
    if count < 1 << 20:
        assert model.chunk_s(start, count + 1, is_new_row=True) >= seconds * (1 - 1e-6)


def test_tokens_attended_to_by_a_chunk_are_those_before_each_token_and_itself() -> None:
    assert chunk_kv_tokens(10, 3) == 11 + 12 + 13


@given(
    start=st.integers(0, 60),
    count=st.integers(1, 40),
    windows=st.lists(st.none() | st.builds(Window, st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=3),
)
def test_behind_a_window_only_what_is_seen_counts(start: int, count: int, windows: list[Window | None]) -> None:
    lengths = range(start + 1, start + count + 1)
    seen = [length if it is None else min(length, it.num_seen) for it in windows for length in lengths]
    assert chunk_kv_tokens(start, count, tuple(windows)) == pytest.approx(sum(seen) / len(windows))


def test_a_chunk_behind_a_window_is_granted_what_it_really_costs() -> None:
    budget, far = TimeBudget(SchedulerConfig(8, 512, 512, step_budget_s=0.05)), 10**6
    budget.cost = fitted()
    budget.open(32, 32 * 500)
    assert budget.take(far, 500) == 0
    budget.open(32, 32 * 500)
    near = budget.take(100, 500)
    budget.open(32, 32 * 500)
    granted = budget.take(far, 500, windows=(Window(100),))
    assert 1 <= near < granted < 500

    def cost_s(count: int) -> float:
        return budget.cost.chunk_s(far, count, is_new_row=True, windows=(Window(100),))

    assert cost_s(granted) < budget.cost.chunk_s(100, near + 1, is_new_row=True)
    assert cost_s(granted + 1) > budget.cost.chunk_s(100, near, is_new_row=True)


@pytest.mark.parametrize("forgetting", [0.0, 1.0, -1.0])
def test_a_forgetting_that_forgets_all_or_nothing_is_refused(forgetting: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        CostModel(forgetting)


# Budgets


def test_a_time_budget_grants_what_the_model_says_and_keeps_a_share_for_chunks() -> None:
    budget = TimeBudget(SchedulerConfig(8, 512, 512, step_budget_s=0.05, first_chunk_s=0.05))
    budget.cost = fitted()
    budget.open(32, 32 * 500)
    left_s = 0.05 - budget.cost.predict(StepLoad(32, 32 * 500, 32))
    granted = budget.take(4000, 500)
    assert 1 <= granted < 500
    assert budget.cost.chunk_s(4000, granted, is_new_row=True) <= left_s
    assert budget.take(0, 40) <= 1
    budget.open(32, 10**7)  # the decodes alone take longer than the budget
    granted = budget.take(4000, 500)
    assert budget.cost.chunk_s(4000, granted, is_new_row=True) <= 0.0125
    assert budget.cost.chunk_s(4000, granted + 1, is_new_row=True) > 0.0125
    budget.open(32, 10**7)
    assert budget.take(10**7, 500) == 0
    assert budget.take(10**7, 500, is_first=True) == 1, "a prompt always advances"


def test_no_budget_grants_more_tokens_than_the_step_has_room_for() -> None:
    config = SchedulerConfig(8, 100, 100, step_budget_s=1e9)
    for budget in (TimeBudget(config), TokenBudget(config)):
        budget.open(8, 8)
        assert budget.num_tokens() == 92
        assert [budget.take(0, 60), budget.take(0, 60, is_first=True), budget.take(0, 1)] == [60, 32, 0]
