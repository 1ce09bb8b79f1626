"""Requests that wait for their readers, whose clients give up, or that another worker is to go on with."""

from __future__ import annotations

import pytest

from common.types import Band, Reason
from tests.support.fake_executor import generate
from tests.unit.worker.engine.rig import SESSION, VOCAB_SIZE, EngineRig, reason_of
from worker.engine.request import RequestState


def pause(rig: EngineRig, request_id: str, is_paused: bool = True) -> None:
    rig.engine.set_paused(SESSION, request_id, 1, is_paused)


def steps(rig: EngineRig, count: int) -> None:
    for _ in range(count):
        rig.step()


def test_a_paused_request_makes_nothing_and_then_the_same_as_ever() -> None:
    rig = EngineRig()
    prompts = {"slow": [1, 2, 3, 4, 5], "other": [6, 7, 8]}
    for request_id, prompt in prompts.items():
        rig.submit(request_id, prompt, 20)
    steps(rig, 5)
    pause(rig, "slow")
    made = len(rig.of("slow").token_ids)
    steps(rig, 5)
    assert len(rig.of("slow").token_ids) == made
    assert len(rig.of("other").token_ids) == made + 5
    pause(rig, "slow", False)
    rig.run()
    for request_id, prompt in prompts.items():
        rig.assert_generated(request_id, prompt, 20)
    rig.assert_idle()


def test_when_all_are_paused_there_is_no_work_and_the_news_are_told() -> None:
    rig = EngineRig()
    rig.submit("a", [1, 2, 3], 20)
    steps(rig, 3)
    pause(rig, "a")
    rig.run(max_steps=2)
    assert not rig.engine.has_work
    rig.submit("b", [4, 5], 6)
    rig.run()
    rig.assert_generated("b", [4, 5], 6)
    pause(rig, "a", False)
    rig.run()
    rig.assert_generated("a", [1, 2, 3], 20)


def test_a_prompt_can_be_paused_between_its_chunks() -> None:
    rig = EngineRig(budget=8, max_chunk=4)
    prompt = list(range(30))
    rig.submit("a", prompt, 4)
    steps(rig, 2)
    pause(rig, "a")
    rig.run(max_steps=2)
    pause(rig, "a", False)
    rig.run()
    rig.assert_generated("a", prompt, 4)


def test_a_paused_request_is_the_first_to_give_its_blocks_whatever_its_band() -> None:
    rig = EngineRig(num_blocks=8, block_size=4)
    rig.submit("paid", [1, 2, 3, 4], 28, band=Band.HIGH)
    rig.submit("batch", [5, 6, 7, 8], 24, band=Band.LOW)
    steps(rig, 6)
    pause(rig, "paid")
    rig.run()
    rig.assert_generated("batch", [5, 6, 7, 8], 24)
    [paid] = rig.scheduler.waiting
    assert (paid.state, paid.num_preemptions) == (RequestState.WAITING, 1)
    pause(rig, "paid", False)
    rig.run()
    rig.assert_generated("paid", [1, 2, 3, 4], 28)


def test_a_paused_request_makes_way_for_a_newcomer_and_its_slot_is_told_as_free() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.submit("slow", [1, 2, 3], 20)
    steps(rig, 3)
    assert rig.usage[SESSION].free_slots == 0
    pause(rig, "slow")
    rig.step()
    rig.step()
    assert rig.usage[SESSION].free_slots == 1
    rig.now_s = 1.0
    rig.submit("new", [4, 5, 6], 5, arrived_s=0.0)
    rig.run()
    rig.assert_generated("new", [4, 5, 6], 5)
    pause(rig, "slow", False)
    rig.run()
    rig.assert_generated("slow", [1, 2, 3], 20)
    rig.assert_idle()


def test_a_request_that_is_paused_while_it_waits_holds_nobody_up() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.submit("runs", [1, 2], 4)
    rig.submit("paused", [3, 4], 4)
    rig.submit("waits", [5, 6], 4)
    pause(rig, "paused")
    rig.run()
    rig.assert_generated("waits", [5, 6], 4)
    assert not rig.of("paused").token_ids
    pause(rig, "paused", False)
    rig.run()
    rig.assert_generated("paused", [3, 4], 4)


@pytest.mark.parametrize("end", ["abort", "session"])
@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_paused_request_can_be_ended(is_waiting: bool, end: str) -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.submit("first", [1, 2], 1 if not is_waiting else 50)
    rig.submit("paused", [3, 4], 9)
    steps(rig, 4)
    pause(rig, "paused")
    rig.step()
    if end == "abort":
        assert rig.abort("paused")
        rig.abort("first")
        rig.run()
        rig.assert_idle()
    else:
        rig.engine.abort_session(SESSION)
        rig.run()
        assert rig.engine.num_requests == rig.pool.counts.referenced == 0


def test_pausing_what_is_not_there_does_nothing() -> None:
    rig = EngineRig()
    pause(rig, "never")
    rig.engine.set_paused(99, "never", 1, False)
    rig.run()


def test_a_request_ends_with_the_step_past_its_deadline() -> None:
    rig = EngineRig(max_num_seqs=1)
    rig.cost_s = lambda batch: 1.0
    rig.submit("runs", [1, 2], 50, timeout_s=10.5)
    rig.submit("waits", [3, 4], 50, timeout_s=4.0)
    rig.submit("late", [5, 6], 3, timeout_s=100.0)
    rig.submit("free", [7, 8], 3)
    rig.run()
    assert reason_of(rig.of("runs")) is reason_of(rig.of("waits")) is Reason.DEADLINE
    assert len(rig.of("runs").token_ids) == 11
    assert rig.of("runs").token_ids == generate([1, 2], 11, vocab_size=VOCAB_SIZE)
    assert not rig.of("waits").token_ids
    rig.assert_generated("late", [5, 6], 3)
    rig.assert_generated("free", [7, 8], 3)
    rig.assert_idle()
    assert len(rig.accounted[SESSION]) == 4


def short_of_memory(*, may_hand_back: bool, hand_back_s: float = 3.0) -> EngineRig:
    """Two that need the whole pool together, until the later one is preempted, after 10 steps of a second."""
    rig = EngineRig(num_blocks=12, block_size=4, long_after_steps=8, grace_steps=0, hand_back_s=hand_back_s)
    rig.cost_s = lambda batch: 1.0
    for request_id, prompt in (("one", [1, 2, 3]), ("two", [4, 5, 6])):
        rig.submit(request_id, prompt, 40, may_hand_back=may_hand_back)
    while not rig.scheduler.waiting.num_returning:
        rig.step()
    return rig


def test_a_long_request_that_finds_no_memory_is_handed_back_after_a_while() -> None:
    rig = short_of_memory(may_hand_back=True)
    [victim] = rig.scheduler.waiting
    steps(rig, 2)
    assert not rig.handed_back
    steps(rig, 2)
    assert rig.handed_back == [(SESSION, victim.request_id, 1)]
    made = rig.of(victim.request_id).token_ids
    prompt = victim.token_ids[:3]
    assert made == generate(prompt, len(made), vocab_size=VOCAB_SIZE)
    assert len(made) > 8
    rig.run()
    assert rig.engine.num_requests == 0
    # It can come again, as it would to another worker.
    rig.submit(victim.request_id, prompt, 40, attempt=2, output_token_ids=made)
    rig.run()
    again = rig.of(victim.request_id, attempt=2).token_ids
    assert [*made, *again] == generate(prompt, 40, vocab_size=VOCAB_SIZE)


def test_without_leave_it_waits_for_its_memory() -> None:
    rig = short_of_memory(may_hand_back=False)
    rig.run()
    assert not rig.handed_back
    rig.assert_generated("one", [1, 2, 3], 40)
    rig.assert_generated("two", [4, 5, 6], 40)


def test_a_paused_request_is_not_handed_back() -> None:
    rig = short_of_memory(may_hand_back=True)
    [victim] = rig.scheduler.waiting
    pause(rig, victim.request_id)
    rig.run()
    assert not rig.handed_back
    pause(rig, victim.request_id, False)
    rig.run()
    rig.assert_idle()


def test_whoever_waits_gets_what_paused_ones_hold_even_of_a_higher_band() -> None:
    """Otherwise nothing would be computed although somebody waits, for as long as the readers are slow."""
    rig = EngineRig(num_blocks=12, block_size=4, max_num_seqs=12, max_thrash=0.01)
    names = [f"slow{number}" for number in range(12)]
    for name in names:
        rig.submit(name, [1, 2], 9, band=Band.HIGH)
    rig.step()
    assert len(rig.scheduler.running) > 8
    for name in names:
        pause(rig, name)
    rig.submit("batch", list(range(40)), 6, band=Band.LOW)
    rig.run()
    rig.assert_generated("batch", list(range(40)), 6)
    for name in names:
        pause(rig, name, False)
    rig.run()
    rig.assert_idle()


def test_without_levels_there_is_no_pausing() -> None:
    rig = EngineRig(mode="paged")
    rig.submit("a", [1, 2, 3], 9)
    pause(rig, "a")
    rig.run()
    rig.assert_generated("a", [1, 2, 3], 9)
