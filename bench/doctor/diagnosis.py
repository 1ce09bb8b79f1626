"""Six questions in order, each answered from the same facts; the first cause that is found is the diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from bench.doctor.facts import Bounds, Facts, derive
from bench.doctor.snapshot import Snapshot

BUSY = 0.8
"""A device that computes for this share of the time is busy: the rest is what a step's surroundings take."""

FULL = 0.9
"""Slots, tokens or time are used up from this share on: means over an interval never reach the bound itself."""

KV_FULL = 0.8
"""Blocks are used up earlier: some are kept for those who run to grow into, and few requests fit into the last ones."""

HELD_BACK = 0.05
"""Tenants' limits hold back what the fleet could serve if they refuse this share of the requests."""

SMALL_CHUNK = 16
"""Tokens. In pieces below this size a prompt pays for steps, not for tokens."""

PATIENCE_S = 0.1
"""A mean wait in the queue from here on means that requests wait, even if none does at the moment of looking."""


class Cause(StrEnum):
    """What limits a deployment."""

    IDLE = "the device is not busy"
    SLOTS = "max_num_seqs is too small"
    MEMORY = "KV memory is full"
    PREFILL = "prefill is starved"
    RATE_LIMIT = "the gateway's rate limit holds requests back"
    COMPUTE = "it is compute-bound"


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer, the figures it was judged by, and what to change if it is the cause."""

    question: str
    cause: Cause
    applies: bool  # whether this is a cause of what was seen
    figures: str
    change: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All six answers in order, and the one that counts."""

    answers: tuple[Answer, ...]

    @property
    def found(self) -> Answer:
        """The first cause that applies; the questions leave no case without one."""
        return next(answer for answer in self.answers if answer.applies)


def diagnose(before: Snapshot, after: Snapshot) -> Diagnosis:
    """What limits the deployment in the time between two snapshots. Raises FactsError if they do not fit together."""
    return judge(derive(before, after), Bounds.of(after))


def judge(facts: Facts, bounds: Bounds) -> Diagnosis:
    """The six answers to these facts."""
    answers = [question(facts, bounds) for question in _QUESTIONS]
    is_explained = any(answer.applies for answer in answers)
    return Diagnosis((*answers, _is_compute_bound(facts, applies=not is_explained)))


def _is_idle(facts: Facts, bounds: Bounds) -> Answer:
    del bounds
    figures = (
        f"a step ran {facts.busy_share:.0%} of the time ({facts.steps_per_s:.1f} steps/s of {_ms(facts.step_s)}); "
        f"{facts.num_waiting:.1f} requests waited"
    )
    if facts.num_waiting >= 1:
        change = (
            "requests wait and the device does not take them: see that workers are READY in the gateways "
            "(python -m client admin workers), use scheduling_mode full (client gathers for gather_ms), "
            "lower low_headroom and normal_headroom, and give the worker's process a core of its own"
        )
    else:
        change = "no setting is in the way, little is asked for: send more, or run fewer workers"
    applies = facts.busy_share < BUSY and not _limits_hold_back(facts)
    return Answer("Is the device busy?", Cause.IDLE, applies, figures, change)


def _has_too_few_slots(facts: Facts, bounds: Bounds) -> Answer:
    figures = (
        f"{facts.rows_per_step:.1f} of {bounds.max_num_seqs:.0f} slots were in a step of {_ms(facts.step_s)} "
        f"(budget {_ms(bounds.step_budget_s)}); {_waits(facts)}; "
        f"{facts.referenced_share:.0%} of the KV blocks were held"
    )
    applies = (
        _is_busy(facts)
        and _waits_for_something(facts)
        and _slots_are_full(facts, bounds)
        and facts.referenced_share < KV_FULL
        and facts.step_s < bounds.step_budget_s
    )
    change = (
        f"raise max_num_seqs above {bounds.max_num_seqs:.0f}: memory and the steps' time leave room for more requests"
    )
    return Answer("Is max_num_seqs too small?", Cause.SLOTS, applies, figures, change)


def _is_memory_full(facts: Facts, bounds: Bounds) -> Answer:
    figures = (
        f"{facts.referenced_share:.0%} of the KV blocks were held, {facts.num_preempted:.0f} requests were preempted "
        f"for memory, {facts.num_overtakes:.0f} overtook one that waits for memory; {_waits(facts)}"
    )
    is_short = facts.referenced_share >= KV_FULL or facts.num_preempted > 0 or facts.num_overtakes > 0
    waits = _waits_for_something(facts) or facts.num_preempted > 0
    # With full slots and memory to spare, a single preemption is no reason for the waiting.
    is_memory = facts.referenced_share >= KV_FULL or not _slots_are_full(facts, bounds)
    change = (
        "raise kv_cache_mib; else use scheduling_mode full (blocks as requests grow, prefixes shared), "
        "let clients ask for fewer max_tokens, or add workers"
    )
    return Answer(
        "Is KV memory full?", Cause.MEMORY, _is_busy(facts) and is_short and waits and is_memory, figures, change
    )


def _is_prefill_starved(facts: Facts, bounds: Bounds) -> Answer:
    figures = (
        f"{facts.tokens_per_step:.0f} of {bounds.max_num_batched_tokens:.0f} tokens were in a step of "
        f"{_ms(facts.step_s)} (budget {_ms(bounds.step_budget_s)}), {facts.chunk_share:.0%} of them of prompts, "
        f"in chunks of {facts.tokens_per_chunk:.0f}; a first chunk waited {_ms(facts.first_chunk_wait_s)} "
        f"(aim {_ms(bounds.first_chunk_s)})"
    )
    has_room = not _slots_are_full(facts, bounds) and facts.referenced_share < KV_FULL and facts.num_chunks > 0
    is_token_bound = (
        facts.tokens_per_step >= FULL * bounds.max_num_batched_tokens and facts.step_s < FULL * bounds.step_budget_s
    )
    is_late = facts.first_chunk_wait_s > bounds.first_chunk_s + facts.step_s
    is_crowded_out = is_late and facts.chunk_share < 0.5
    is_cut_up = facts.tokens_per_chunk < SMALL_CHUNK and facts.further_share > 0.5
    applies = _is_busy(facts) and has_room and (is_token_bound or is_crowded_out or is_cut_up)
    if is_token_bound:
        change = f"raise max_num_batched_tokens above {bounds.max_num_batched_tokens:.0f}: steps end before their time"
    else:
        change = (
            f"raise step_budget_ms above {1e3 * max(bounds.step_budget_s, facts.step_s):.0f}: decodes and what every "
            "step costs take the steps' time, and prompts get what is left; or lower max_num_seqs"
        )
    return Answer("Is prefill starved?", Cause.PREFILL, applies, figures, change)


def _does_a_limit_hold_back(facts: Facts, bounds: Bounds) -> Answer:
    del bounds
    reasons = ", ".join(f"{reason} {count:.0f}" for reason, count in facts.limited.items()) or "none"
    figures = (
        f"tenants' limits refused {facts.num_limited:.0f} of {facts.num_requests:.0f} requests "
        f"({facts.limited_share:.0%}: {reasons}); the device was busy {facts.busy_share:.0%} of the time"
    )
    applies = _limits_hold_back(facts) and not _is_busy(facts)
    names = {
        "REQUEST_RATE": "requests_per_minute",
        "TOKEN_RATE": "tokens_per_minute",
        "CONCURRENCY": "max_concurrent",
        "DAILY_BUDGET": "tokens_per_day",
    }
    settings = [names[reason] for reason in facts.limited]
    change = f"raise {' and '.join(settings)} of the tenants that are refused: the device has time for more"
    return Answer("Does the gateway's rate limit hold requests back?", Cause.RATE_LIMIT, applies, figures, change)


def _is_compute_bound(facts: Facts, *, applies: bool) -> Answer:
    figures = (
        f"a step ran {facts.busy_share:.0%} of the time, {_ms(facts.step_s)} each, with {facts.rows_per_step:.1f} "
        f"requests and {facts.tokens_per_step:.0f} tokens; {_waits(facts)}"
    )
    change = (
        "no setting makes it faster: add workers or cores, take a smaller or quantized model; "
        "to keep latencies, let fewer requests in (queue_ttl_s, max_queue_length, tenants' limits)"
    )
    return Answer("Is it compute-bound?", Cause.COMPUTE, applies, figures, change)


_QUESTIONS: tuple[Callable[[Facts, Bounds], Answer], ...] = (  # before the last: is it none of these?
    _is_idle,
    _has_too_few_slots,
    _is_memory_full,
    _is_prefill_starved,
    _does_a_limit_hold_back,
)


def _is_busy(facts: Facts) -> bool:
    return facts.busy_share >= BUSY


def _limits_hold_back(facts: Facts) -> bool:
    return facts.limited_share >= HELD_BACK


def _slots_are_full(facts: Facts, bounds: Bounds) -> bool:
    return facts.rows_per_step >= FULL * bounds.max_num_seqs


def _waits_for_something(facts: Facts) -> bool:
    return facts.num_waiting >= 1 or facts.queue_wait_s >= PATIENCE_S


def _waits(facts: Facts) -> str:
    return (
        f"{facts.queued:.1f} requests waited at gateways ({_ms(facts.queue_wait_s)} each), "
        f"{facts.waiting:.1f} at workers"
    )


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
