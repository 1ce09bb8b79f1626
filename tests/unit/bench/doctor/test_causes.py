"""Each of the six causes, reproduced with the real engine in simulated time, is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.doctor.diagnosis import Cause, Diagnosis, diagnose
from tests.unit.bench.doctor.clinic import Bounds, FrontDesk, Lengths, Patient

ROOMY = Bounds(max_num_seqs=64, max_num_batched_tokens=512, step_budget_s=0.05, first_chunk_s=0.1)
WARM_UP_S, INTERVAL_S = 5.0, 20.0


def observe(patient: Patient, num_users: int, lengths: Lengths, pause_s: float = 0.0) -> Diagnosis:
    """Under this load, once it has settled."""
    patient.live(WARM_UP_S, num_users, lengths, pause_s)
    before = patient.snapshot()
    patient.live(INTERVAL_S, num_users, lengths, pause_s)
    return diagnose(before, patient.snapshot())


def slots(count: int) -> Bounds:
    return Bounds(count, 512, 0.05, 0.1)


CASES: dict[str, tuple[Cause, str, Callable[[], Diagnosis]]] = {
    "users who think longer than they wait": (
        Cause.IDLE,
        "send more",
        lambda: observe(Patient(ROOMY), 2, (40, 10), pause_s=3.0),
    ),
    "nobody": (Cause.IDLE, "send more", lambda: observe(Patient(ROOMY), 1, (4, 1), pause_s=1e6)),
    "twenty users for four slots": (
        Cause.SLOTS,
        "max_num_seqs above 4",
        lambda: observe(Patient(slots(4)), 20, (40, 60)),
    ),
    "forty users in a small pool": (
        Cause.MEMORY,
        "kv_cache_mib",
        lambda: observe(Patient(ROOMY, num_blocks=65), 40, (40, 120)),
    ),
    "a small pool whose memory is reserved": (
        Cause.MEMORY,
        "scheduling_mode full",
        lambda: observe(Patient(ROOMY, num_blocks=65, mode="continuous"), 40, (40, 120)),
    ),
    "long prompts through a small token budget": (
        Cause.PREFILL,
        "max_num_batched_tokens above 16",
        lambda: observe(Patient(Bounds(16, 16, 0.05, 0.1)), 10, (600, 20)),
    ),
    "steps that cost more than their time": (
        Cause.PREFILL,
        "step_budget_ms above",
        lambda: observe(Patient(Bounds(16, 512, 0.015, 0.015)), 6, (300, 20)),
    ),
    "more decodes than the steps' time allows": (
        Cause.COMPUTE,
        "add workers",
        lambda: observe(Patient(ROOMY), 100, (20, 200)),
    ),
    "long prompts and time used up": (
        Cause.COMPUTE,
        "add workers",
        lambda: observe(Patient(ROOMY), 16, (600, 20)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_found(case: str) -> None:
    cause, change, make = CASES[case]
    diagnosis = make()
    assert diagnosis.found.cause is cause, [
        f"{each.cause}: {each.applies}, {each.figures}" for each in diagnosis.answers
    ]
    assert change in diagnosis.found.change
    assert [answer.cause for answer in diagnosis.answers] == list(Cause), "the questions keep their order"


@pytest.mark.parametrize(
    ("worse", "better", "num_users", "lengths"),
    [
        (Patient(slots(4)), Patient(slots(16)), 20, (40, 60)),
        (Patient(ROOMY, num_blocks=65), Patient(ROOMY), 40, (40, 120)),
        (Patient(Bounds(16, 16, 0.05, 0.1)), Patient(Bounds(16, 256, 0.05, 0.1)), 10, (600, 20)),
        (Patient(Bounds(16, 512, 0.015, 0.015)), Patient(Bounds(16, 512, 0.06, 0.1)), 6, (300, 20)),
    ],
    ids=["slots", "memory", "prefill by tokens", "prefill by time"],
)
def test_the_change_that_is_advised_makes_more_tokens(
    worse: Patient, better: Patient, num_users: int, lengths: Lengths
) -> None:
    made = []
    for patient in (worse, better):
        patient.live(INTERVAL_S, num_users, lengths)
        made.append(patient.snapshot().worker_total("output_tokens_total"))
    assert made[1] > 1.15 * made[0]


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
        ("REQUEST_RATE", "requests_per_minute"),
        ("TOKEN_RATE", "tokens_per_minute"),
        ("CONCURRENCY", "max_concurrent"),
        ("DAILY_BUDGET", "tokens_per_day"),
    ],
)
def test_limits_that_leave_the_device_idle_hold_back(reason: str, setting: str) -> None:
    patient, desk = Patient(ROOMY), FrontDesk()
    patient.live(WARM_UP_S, 2, (40, 10), 3.0)
    before = patient.snapshot(desk.reading)
    patient.live(INTERVAL_S, 2, (40, 10), 3.0)
    desk.metrics.requests.labels("normal", "completed").inc(12)
    desk.metrics.requests.labels("normal", "rejected").inc(30)
    desk.metrics.rejected.labels(reason).inc(30)
    found = diagnose(before, patient.snapshot(desk.reading)).found
    assert found.cause is Cause.RATE_LIMIT
    assert f"raise {setting} " in found.change
    assert "30 of 42 requests" in found.figures


def test_limits_that_protect_a_busy_device_are_not_the_cause() -> None:
    patient, desk = Patient(slots(4)), FrontDesk()
    patient.live(WARM_UP_S, 20, (40, 60))
    before = patient.snapshot(desk.reading)
    patient.live(INTERVAL_S, 20, (40, 60))
    desk.metrics.requests.labels("normal", "rejected").inc(30)
    desk.metrics.rejected.labels("REQUEST_RATE").inc(30)
    assert diagnose(before, patient.snapshot(desk.reading)).found.cause is Cause.SLOTS
