"""What every implementation of the `Queue` port does; one body, run against each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
import redis

from common.clock import SystemClock
from common.errors import DuplicateRequestError, LimitExceededError
from common.types import Band, Reason
from gateway.admission.limiter import Cost
from gateway.admission.limits import TenantLimits
from gateway.queueing.queue import Claim, InboxMessage, Place, Queue, WorkerRecord
from gateway.store.redis_limiter import RedisLimiter
from gateway.store.redis_queue import QueueSettings, RedisQueue
from tests.support.queueing import entry, eventually, ids, report
from tests.support.redis import pool_keys, request_keys

MakeQueue = Callable[..., Queue]
# What ends by itself is for those tests that set it.
SETTINGS = QueueSettings(max_overtakes=3, claim_lease_s=600, report_ttl_s=600, owner_ttl_s=600, timeout_s=60)


@pytest_asyncio.fixture(params=["redis"])
async def make_queue(redis_url: str, redis_client: redis.Redis, pool: str) -> AsyncIterator[MakeQueue]:
    made: list[RedisQueue] = []

    def make(gateway_id: str = "g1", settings: QueueSettings = SETTINGS) -> Queue:
        made.append(RedisQueue(redis_url, pool=pool, gateway_id=gateway_id, settings=settings))
        return made[-1]

    yield make
    left = request_keys(redis_client, pool)  # before closing, which would remove them
    for queue in made:
        await queue.close()
    assert not left


@pytest.fixture
def queue(make_queue: MakeQueue) -> Queue:
    return make_queue()


async def enqueue(queue: Queue, *request_ids: str, **fields: object) -> None:
    for request_id in request_ids:
        await queue.enqueue(entry(request_id, **fields), max_length=1000)  # type: ignore[arg-type]


async def finish(queue: Queue, *request_ids: str) -> None:
    for request_id in request_ids:
        assert await queue.finish(request_id)


async def requeue(
    queue: Queue, request_id: str, attempt: int, place: Place, input_tokens: int, **fields: object
) -> bool:
    item = entry(request_id, input_tokens=input_tokens, **fields)  # type: ignore[arg-type]
    return await queue.requeue(item, attempt=attempt, place=place)


class TestOrder:
    async def test_first_come_first_served_inside_a_band(self, queue: Queue) -> None:
        await enqueue(queue, "c", "a", "b")
        assert ids(await queue.dispatch([report(slots=2)])) == ["c", "a"]
        assert ids(await queue.dispatch([report(seq=2, slots=3)])) == ["b"]
        await finish(queue, "a", "b", "c")

    async def test_bands_are_served_in_order(self, queue: Queue) -> None:
        await enqueue(queue, "l", band=Band.LOW)
        await enqueue(queue, "n", band=Band.NORMAL)
        await enqueue(queue, "h", band=Band.HIGH)
        assert ids(await queue.dispatch([report()])) == ["h", "n", "l"]
        await finish(queue, "h", "n", "l")

    async def test_work_of_a_lost_worker_goes_before_fresh_work_of_its_band_only(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b")
        claims = await queue.dispatch([report(slots=2)])
        await enqueue(queue, "c")
        await enqueue(queue, "h", band=Band.HIGH)
        for claim in reversed(claims):
            assert await requeue(queue, claim.request_id, 1, Place.FIRST, 9)
        again = await queue.dispatch([report(epoch=2)])
        assert ids(again) == ["h", "a", "b", "c"]
        assert [claim.attempt for claim in again] == [1, 2, 2, 1]
        await finish(queue, "a", "b", "c", "h")

    async def test_what_is_enqueued_as_resumed_goes_before_fresh_work_of_its_flow(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b")
        await enqueue(queue, "c", is_resumed=True)
        assert ids(await queue.dispatch([report()])) == ["c", "a", "b"]
        await finish(queue, "a", "b", "c")

    async def test_a_claim_handed_back_keeps_its_place(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b")
        await queue.dispatch([report(slots=1)])
        assert await requeue(queue, "a", 1, Place.SAME, 1)
        assert ids(await queue.dispatch([report(seq=2)])) == ["a", "b"]
        await finish(queue, "a", "b")

    async def test_a_resumed_request_handed_back_stays_ahead_of_fresh_ones(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b")
        await queue.dispatch([report(slots=2)])
        assert await requeue(queue, "b", 1, Place.FIRST, 1)
        assert await requeue(queue, "a", 1, Place.SAME, 1)
        assert ids(await queue.dispatch([report(seq=2, slots=1)])) == ["b"]
        assert await requeue(queue, "b", 2, Place.SAME, 1)
        assert ids(await queue.dispatch([report(seq=3)])) == ["b", "a"]
        await finish(queue, "a", "b")


class TestFairness:
    """Weights of tokens are 1 for input and 2 for output; entries need one block and have the input given."""

    async def test_the_flow_served_least_goes_first(self, queue: Queue) -> None:
        await enqueue(queue, "a1", "a2", "a3", tenant="a", input_tokens=100)
        await enqueue(queue, "b1", "b2", "b3", tenant="b", input_tokens=40)
        claims = await queue.dispatch([report(slots=6, max_num_seqs=6)])
        assert ids(claims) == ["a1", "b1", "b2", "b3", "a2", "a3"]  # 0 0, 100 0, 100 40, 100 80, 100, 200
        await finish(queue, "a1", "a2", "a3", "b1", "b2", "b3")

    async def test_weights_divide_what_is_counted(self, queue: Queue) -> None:
        await enqueue(queue, *(f"a{i}" for i in range(6)), tenant="a", input_tokens=30, weight=3)
        await enqueue(queue, *(f"b{i}" for i in range(6)), tenant="b", input_tokens=30, weight=1)
        claims = await queue.dispatch([report(slots=8, max_num_seqs=8)])
        assert sorted(ids(claims)) == [*(f"a{i}" for i in range(6)), "b0", "b1"]
        await finish(queue, *(f"{tenant}{i}" for tenant in "ab" for i in range(6)))

    async def test_output_counts_twice_as_it_is_made(self, queue: Queue) -> None:
        await enqueue(queue, "a1", tenant="a", input_tokens=10)
        await enqueue(queue, "b1", tenant="b", input_tokens=29)
        await queue.dispatch([report(slots=2)])
        await enqueue(queue, "a2", tenant="a")
        await enqueue(queue, "b2", tenant="b")
        await queue.charge({entry("a1", tenant="a").flow: 9})
        assert ids(await queue.dispatch([report(seq=2, slots=3)])) == ["a2"], "28 against 29"
        await enqueue(queue, "a3", tenant="a")
        await queue.charge({entry("a1", tenant="a").flow: 1})
        assert ids(await queue.dispatch([report(seq=3, slots=4)])) == ["b2"], "31 against 29"
        await finish(queue, "a1", "a2", "a3", "b1", "b2")

    async def test_who_returns_has_saved_nothing_up(self, queue: Queue) -> None:
        await enqueue(queue, "b1", tenant="b", input_tokens=1)
        await enqueue(queue, *(f"a{i}" for i in range(9)), tenant="a", input_tokens=100)
        assert ids(await queue.dispatch([report(slots=6, max_num_seqs=9)])) == ["a0", "b1", "a1", "a2", "a3", "a4"]
        await enqueue(queue, *(f"b{i}" for i in range(2, 6)), tenant="b", input_tokens=100)
        claims = await queue.dispatch([report(seq=2, slots=11, max_num_seqs=11)])
        assert ids(claims) == ["a5", "b2", "a6", "b3", "a7"], "lifted to 500: turn about"
        await finish(queue, *(f"a{i}" for i in range(9)), *(f"b{i}" for i in range(1, 6)))

    async def test_who_returns_to_an_empty_queue_is_lifted_too(self, queue: Queue) -> None:
        await enqueue(queue, "b1", tenant="b", input_tokens=1)
        await enqueue(queue, "a1", tenant="a", input_tokens=500)
        await queue.dispatch([report(slots=2)])
        await enqueue(queue, "a2", tenant="a", input_tokens=500)
        await queue.dispatch([report(seq=2, slots=3)])
        await enqueue(queue, "b2", "b3", tenant="b", input_tokens=400)  # from 500, the counter of a2's choice
        await enqueue(queue, "a3", tenant="a", input_tokens=1)  # has 1000
        assert ids(await queue.dispatch([report(seq=3, slots=5, max_num_seqs=5)])) == ["b2", "b3"]
        await finish(queue, "a1", "a2", "a3", "b1", "b2", "b3")

    async def test_a_claim_that_did_nothing_is_not_counted(self, queue: Queue) -> None:
        await enqueue(queue, "a1", "a2", tenant="a", input_tokens=100)
        await enqueue(queue, "b1", tenant="b", input_tokens=60)
        await enqueue(queue, "b2", tenant="b", input_tokens=60)
        assert ids(await queue.dispatch([report(slots=2)])) == ["a1", "b1"]
        assert await requeue(queue, "a1", 1, Place.SAME, 100)
        assert ids(await queue.dispatch([report(seq=2, slots=2)])) == ["a1"], "0 against 60"
        await finish(queue, "a1", "a2", "b1", "b2")

    async def test_a_request_whose_worker_was_lost_is_counted_once(self, queue: Queue) -> None:
        await enqueue(queue, "a1", "a2", tenant="a", input_tokens=100)
        await enqueue(queue, "b1", "b2", "b3", tenant="b", input_tokens=60)
        assert ids(await queue.dispatch([report(slots=3)])) == ["a1", "b1", "b2"]
        assert await requeue(queue, "a1", 1, Place.FIRST, 400)
        claims = await queue.dispatch([report(epoch=2, slots=3)])
        assert ids(claims) == ["a1", "a2", "b3"], "100 against 120 before and after a1 is claimed again"
        await finish(queue, "a1", "a2", "b1", "b2", "b3")

    async def test_what_was_handed_back_goes_behind_fresh_work_of_its_flow(self, queue: Queue) -> None:
        await enqueue(queue, "long", "a", "b")
        await queue.dispatch([report(slots=1)])
        assert await requeue(queue, "long", 1, Place.LAST, 900)
        await enqueue(queue, "c")
        assert ids(await queue.dispatch([report(seq=2)])) == ["a", "b", "c", "long"]
        await finish(queue, "long", *"abc")

    async def test_every_gateway_counts_the_same_flow(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await enqueue(g1, "a1", tenant="a", input_tokens=10)
        await g2.dispatch([report(slots=1)])
        await g1.charge({entry("x", tenant="a").flow: 50})
        await enqueue(g2, "b1", owner="g2", tenant="b", input_tokens=10)
        await enqueue(g1, "a2", tenant="a", input_tokens=10)
        await g2.charge({entry("x", tenant="a").flow: 50})
        assert ids(await g1.dispatch([report(seq=2, slots=2)])) == ["b1"], "the claim of a1 takes the other slot"
        await finish(g1, "a1", "a2")
        await finish(g2, "b1")

    async def test_a_tenant_may_have_only_so_many_waiting(self, queue: Queue) -> None:
        await queue.enqueue(entry("a1", tenant="a"), max_length=9, max_of_tenant=2)
        await queue.enqueue(entry("a2", tenant="a", model="n", band=Band.LOW), max_length=9, max_of_tenant=2)
        with pytest.raises(LimitExceededError) as caught:
            await queue.enqueue(entry("a3", tenant="a"), max_length=9, max_of_tenant=2)
        assert caught.value.reason is Reason.QUEUE_FULL
        assert [quota.subject for quota in caught.value.quotas] == ["tenant:a"]
        assert await queue.owner_of("a3") is None
        await queue.enqueue(entry("b1", tenant="b"), max_length=9, max_of_tenant=2)
        await finish(queue, "a1", "a2", "b1")


class TestShares:
    """Of the tokens served while they wait behind a higher band, lower bands get their least share."""

    async def served(self, queue: Queue, num_rounds: int, num_slots: int) -> dict[str, int]:
        """Claims by the first letter of the request; whatever is claimed ends before the next round."""
        served = dict.fromkeys("hnl", 0)
        for seq in range(1, num_rounds + 1):
            for claim in await queue.dispatch([report(seq=seq, slots=num_slots, max_num_seqs=num_slots)]):
                served[claim.request_id[0]] += 1
                await finish(queue, claim.request_id)
        return served

    async def test_a_lower_band_gets_its_share_and_no_more(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, normal_share=0.2, low_share=0.1, claims_per_long_wait=10**9))
        waiting = [f"{band.name[0].lower()}{i}" for band in Band for i in range(200)]
        for request_id in waiting:
            band = {"h": Band.HIGH, "n": Band.NORMAL, "l": Band.LOW}[request_id[0]]
            await enqueue(queue, request_id, band=band, input_tokens=10)
        served = await self.served(queue, num_rounds=50, num_slots=4)
        assert sum(served.values()) == 200
        assert 38 <= served["n"] <= 40
        assert 18 <= served["l"] <= 20
        for request_id in waiting:
            await queue.finish(request_id)

    async def test_what_a_band_was_served_before_counts(self, make_queue: MakeQueue) -> None:
        """The output of requests that started in a quiet hour is service of their band."""
        queue = make_queue("g1", replace(SETTINGS, normal_share=0.5, claims_per_long_wait=10**9))
        await enqueue(queue, "n0", input_tokens=1)
        await queue.dispatch([report(slots=1)])
        await enqueue(queue, *(f"n{i}" for i in range(1, 9)), input_tokens=10)
        await enqueue(queue, *(f"h{i}" for i in range(8)), band=Band.HIGH, input_tokens=10)
        await queue.charge({entry("n0").flow: 25})  # 50 weighted tokens, where 25 would be its share
        assert ids(await queue.dispatch([report(seq=2, slots=7, max_num_seqs=8)])) == [f"h{i}" for i in range(6)]
        await finish(queue, *(f"n{i}" for i in range(9)), *(f"h{i}" for i in range(8)))

    async def test_nothing_is_saved_up_while_a_band_does_not_wait(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, normal_share=0.5, claims_per_long_wait=10**9))
        await enqueue(queue, *(f"h{i}" for i in range(9)), band=Band.HIGH, input_tokens=100)
        await queue.dispatch([report(slots=4)])
        await enqueue(queue, "n", input_tokens=60)
        assert ids(await queue.dispatch([report(seq=2, slots=7, max_num_seqs=7)])) == ["h4", "h5", "n"]
        await finish(queue, "n", *(f"h{i}" for i in range(9)))

    async def test_a_claim_that_did_nothing_is_no_service(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, normal_share=0.5, claims_per_long_wait=10**9))
        await enqueue(queue, "h0", band=Band.HIGH, input_tokens=100)
        await enqueue(queue, "h1", band=Band.HIGH, input_tokens=10)
        await enqueue(queue, "n", input_tokens=40)
        assert ids(await queue.dispatch([report(slots=1)])) == ["h0"]
        assert await requeue(queue, "h0", 1, Place.SAME, 100)
        assert ids(await queue.dispatch([report(seq=2, slots=3)])) == ["h0", "n", "h1"]
        await finish(queue, "h0", "h1", "n")


class TestHeadroom:
    """What a lower band leaves free for higher ones, unless it is entitled to the claim."""

    async def test_of_slots(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, normal_headroom=0.1, low_headroom=0.3))
        await enqueue(queue, *(f"l{i}" for i in range(9)), band=Band.LOW)
        assert len(await queue.dispatch([report(slots=10, max_num_seqs=10)])) == 7
        await enqueue(queue, *(f"n{i}" for i in range(4)))
        assert ids(await queue.dispatch()) == ["n0", "n1"]
        await enqueue(queue, *(f"h{i}" for i in range(2)), band=Band.HIGH)
        assert ids(await queue.dispatch()) == ["h0"]
        await finish(queue, *(f"l{i}" for i in range(9)), *(f"n{i}" for i in range(4)), "h0", "h1")

    async def test_of_blocks(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, low_headroom=0.2))
        await enqueue(queue, "l0", "l1", band=Band.LOW, blocks=40)
        await enqueue(queue, "l2", band=Band.LOW)
        assert ids(await queue.dispatch([report(slots=9, max_num_seqs=9)])) == ["l0", "l1"]
        await enqueue(queue, "h0", band=Band.HIGH, blocks=20)
        assert ids(await queue.dispatch()) == ["h0"]
        await finish(queue, "l0", "l1", "l2", "h0")

    async def test_what_only_just_fits_into_a_worker_need_leave_nothing(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, low_headroom=0.2))
        await enqueue(queue, "huge", band=Band.LOW, blocks=95)
        assert ids(await queue.dispatch([report()])) == ["huge"]
        await finish(queue, "huge")

    async def test_a_band_that_lacks_of_its_share_need_leave_nothing(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, low_headroom=0.5, low_share=0.1))
        await enqueue(queue, *(f"h{i}" for i in range(9)), band=Band.HIGH, input_tokens=100)
        await enqueue(queue, "l0", "l1", band=Band.LOW, input_tokens=10)
        claims = await queue.dispatch([report(slots=3)])
        assert ids(claims) == ["h0", "l0", "h1"]
        await finish(queue, *(f"h{i}" for i in range(9)), "l0", "l1")

    async def test_a_long_wait_need_leave_nothing(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, low_headroom=0.5, long_wait_s=0.0, claims_per_long_wait=1))
        await enqueue(queue, "l0", "l1", "l2", band=Band.LOW)
        assert len(await queue.dispatch([report(slots=4)])) == 3
        await finish(queue, "l0", "l1", "l2")


class TestLongWaits:
    async def test_now_and_then_the_longest_wait_comes_first(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, long_wait_s=0.0, claims_per_long_wait=4, low_share=0.0))
        await enqueue(queue, "l0", "l1", band=Band.LOW)
        await enqueue(queue, *(f"h{i}" for i in range(8)), band=Band.HIGH)
        claims = await queue.dispatch([report(slots=9, max_num_seqs=9)])
        assert ids(claims) == ["h0", "h1", "h2", "l0", "h3", "h4", "h5", "l1", "h6"]
        await finish(queue, "l0", "l1", *(f"h{i}" for i in range(8)))

    async def test_what_was_handed_back_ages_too(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, long_wait_s=0.0, claims_per_long_wait=3))
        await enqueue(queue, "long")
        await queue.dispatch([report(slots=1)])
        assert await requeue(queue, "long", 1, Place.LAST, 900)
        await enqueue(queue, *"abcd")
        assert ids(await queue.dispatch([report(seq=2)])) == ["a", "long", "b", "c"], "the first claim was its own"
        await finish(queue, "long", *"abcd")

    async def test_a_short_wait_does_not(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, long_wait_s=3600.0, claims_per_long_wait=1, low_share=0.0))
        await enqueue(queue, "l", band=Band.LOW)
        await enqueue(queue, "h", band=Band.HIGH)
        assert ids(await queue.dispatch([report()])) == ["h", "l"]
        await finish(queue, "h", "l")


class TestCredit:
    async def test_without_a_report_nothing_is_claimed(self, queue: Queue) -> None:
        await enqueue(queue, "a")
        assert await queue.dispatch() == []
        await finish(queue, "a")

    async def test_claims_take_slots_until_they_are_accounted_for(self, queue: Queue) -> None:
        await enqueue(queue, *"abcd")
        claims = await queue.dispatch([report(slots=2)])
        assert ids(claims) == ["a", "b"]
        # The worker changed, but its numbers hold none of the claims yet.
        assert await queue.dispatch([report(seq=2, slots=2)]) == []
        # Now they hold "a": one slot is taken in the numbers, one by the claim of "b".
        assert await queue.dispatch([report(seq=3, slots=1, accounted=claims[:1])]) == []
        assert ids(await queue.dispatch([report(seq=4, slots=2, accounted=claims[1:])])) == ["c", "d"]
        await finish(queue, *"abcd")

    async def test_blocks_are_counted_in_the_workers_block_size(self, queue: Queue) -> None:
        await enqueue(queue, "exact")
        await finish(queue, "exact")
        await queue.enqueue(replace(entry("a"), num_tokens_needed=32), max_length=9)
        await queue.enqueue(replace(entry("b"), num_tokens_needed=33), max_length=9)
        await queue.enqueue(replace(entry("c"), num_tokens_needed=16), max_length=9)
        assert ids(await queue.dispatch([report(blocks=5)])) == ["a", "b"]
        assert ids(await queue.dispatch([report(seq=2, blocks=6)])) == ["c"]
        await finish(queue, *"abc")

    async def test_claims_take_blocks_until_they_are_accounted_for(self, queue: Queue) -> None:
        await enqueue(queue, "a", blocks=60)
        claims = await queue.dispatch([report()])
        await enqueue(queue, "b", blocks=50)
        assert await queue.dispatch([report(seq=2)]) == []
        assert await queue.dispatch([report(seq=3, slots=3, blocks=40, accounted=claims)]) == []
        assert ids(await queue.dispatch([report(seq=4, blocks=50)])) == ["b"]
        await finish(queue, "a", "b")

    async def test_a_finished_claim_gives_its_credit_back(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b", blocks=60)
        assert ids(await queue.dispatch([report()])) == ["a"]
        await finish(queue, "a")
        assert ids(await queue.dispatch()) == ["b"]
        await finish(queue, "b")

    @pytest.mark.parametrize(("epoch", "seq"), [(5, 4), (4, 9), (4, 2**63)])
    async def test_a_stale_report_changes_no_numbers(self, queue: Queue, epoch: int, seq: int) -> None:
        await queue.dispatch([report(epoch=5, seq=5, slots=0)])
        await enqueue(queue, "a")
        assert await queue.dispatch([report(epoch=epoch, seq=seq, slots=4)]) == []
        assert ids(await queue.dispatch([report(epoch=5, seq=6, slots=4)])) == ["a"]
        await finish(queue, "a")

    async def test_sequence_numbers_are_compared_as_numbers(self, queue: Queue) -> None:
        await queue.dispatch([report(seq=9, slots=4), report(seq=10, slots=0)])
        await enqueue(queue, "a")
        assert await queue.dispatch([report(seq=9, slots=4)]) == []
        await finish(queue, "a")

    async def test_epochs_of_64_bits_are_told_apart(self, queue: Queue) -> None:
        new, old = 2**63 + 1, 2**63
        await queue.dispatch([report(epoch=new, seq=1, slots=0)])
        await enqueue(queue, "a")
        assert await queue.dispatch([report(epoch=old, seq=2)]) == []
        claims = await queue.dispatch([report(epoch=new, seq=2)])
        assert [claim.worker_epoch for claim in claims] == [new]
        await finish(queue, "a")

    async def test_a_late_report_still_accounts_for_its_claims(self, queue: Queue) -> None:
        """Two sessions of one worker: the numbers of both are the same, the accounted claims are each its own."""
        await enqueue(queue, "a", "b")
        claims = await queue.dispatch([report(slots=2)])
        await enqueue(queue, "c")
        assert await queue.dispatch([report(seq=3, slots=1, accounted=claims[:1])]) == []
        assert ids(await queue.dispatch([report(seq=2, slots=4, accounted=claims[1:])])) == ["c"]
        await finish(queue, "a", "b", "c")

    async def test_an_accounted_earlier_attempt_does_not_free_the_present_claim(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b")
        first = await queue.dispatch([report(slots=1)])
        assert await requeue(queue, "a", 1, Place.SAME, 1)
        assert ids(await queue.dispatch([report(seq=2, slots=1)])) == ["a"]
        assert await queue.dispatch([report(seq=3, slots=1, accounted=first)]) == []
        await finish(queue, "a", "b")

    async def test_a_restarted_worker_starts_without_claims(self, queue: Queue) -> None:
        await enqueue(queue, *"abcdefgh")
        assert len(await queue.dispatch([report(epoch=1, seq=7)])) == 4
        claims = await queue.dispatch([report(epoch=2, seq=1)])
        assert ids(claims) == ["e", "f", "g", "h"]
        assert {claim.worker_epoch for claim in claims} == {2}
        await finish(queue, *"abcdefgh")

    async def test_a_forgotten_worker_has_no_credit_until_it_reports_again(self, queue: Queue) -> None:
        await queue.dispatch([report(epoch=2, seq=3)])
        await queue.forget_worker("w1", epoch=1)
        await enqueue(queue, "a", "b")
        assert len(await queue.dispatch()) == 2
        await queue.forget_worker("w1", epoch=2)
        await enqueue(queue, "c")
        assert await queue.dispatch() == []
        assert await queue.dispatch([report(epoch=2, seq=2)]) == []
        assert ids(await queue.dispatch([report(epoch=2, seq=3)])) == ["c"]
        await finish(queue, *"abc")


class TestPlacement:
    async def test_the_worker_with_the_larger_free_share_takes_it(self, queue: Queue) -> None:
        await enqueue(queue, *"abcd")
        workers = [report("w1", slots=4, max_num_seqs=8), report("w2", slots=2, max_num_seqs=2)]
        claims = await queue.dispatch(workers)
        assert [claim.worker_id for claim in claims] == ["w2", "w1", "w2", "w1"]
        await finish(queue, *"abcd")

    async def test_equal_shares_go_by_blocks_then_by_id(self, queue: Queue) -> None:
        await enqueue(queue, *"ab")
        blocks = {"w3": 50, "w2": 60, "w1": 50}
        claims = await queue.dispatch([report(worker, slots=2, blocks=count) for worker, count in blocks.items()])
        assert [claim.worker_id for claim in claims] == ["w2", "w1"]
        await finish(queue, *"ab")

    async def test_only_workers_that_can_hold_it_are_considered(self, queue: Queue) -> None:
        await enqueue(queue, "big", blocks=50)
        claims = await queue.dispatch([report("w1", slots=4, blocks=40), report("w2", slots=1, blocks=50)])
        assert [claim.worker_id for claim in claims] == ["w2"]
        await finish(queue, "big")

    async def test_the_scarcer_of_slots_and_blocks_is_the_load(self, queue: Queue) -> None:
        await enqueue(queue, "a")
        claims = await queue.dispatch([report("w1", slots=4, blocks=20), report("w2", slots=1, blocks=60)])
        assert [claim.worker_id for claim in claims] == ["w2"]
        await finish(queue, "a")

    async def test_who_has_the_input_cached_takes_it_unless_it_is_much_more_loaded(self, queue: Queue) -> None:
        for name, w1_slots, expected in (("a", 8, "w1"), ("b", 7, "w1"), ("c", 6, "w2")):
            await enqueue(queue, name, input_tokens=100, blocks=7, cached={"w1": 6})
            seq = 10 * ord(name)
            workers = [
                report("w1", seq=seq, slots=w1_slots, max_num_seqs=8),
                report("w2", seq=seq, slots=8, max_num_seqs=8),
            ]
            [claim] = await queue.dispatch(workers)
            assert claim.worker_id == expected
            await finish(queue, name)

    async def test_little_of_the_input_makes_up_for_little_load(self, queue: Queue) -> None:
        await enqueue(queue, "a", input_tokens=1000, blocks=7, cached={"w1": 6})
        [claim] = await queue.dispatch([report("w1", slots=7, max_num_seqs=8), report("w2", slots=8, max_num_seqs=8)])
        assert claim.worker_id == "w2"
        await finish(queue, "a")

    async def test_a_hot_prefix_spreads(self, queue: Queue) -> None:
        names = [f"r{number:02}" for number in range(24)]
        await enqueue(queue, *names, input_tokens=16, cached={"w1": 1})
        claims = await queue.dispatch([report(it, slots=16, max_num_seqs=16) for it in ("w1", "w2")])
        taken = [claim.worker_id for claim in claims]
        assert taken[:8] == [*["w1"] * 4, *["w2", "w1"] * 2], "a quarter of the worker ahead, never more"
        assert (taken.count("w1"), taken.count("w2")) == (14, 10)
        await finish(queue, *names)

    async def test_what_is_believed_cached_is_renewed(self, queue: Queue) -> None:
        await enqueue(queue, "a", input_tokens=16, cached={"w1": 1})
        [first] = await queue.dispatch([report("w1"), report("w2")])
        assert first.worker_id == "w1"
        assert await requeue(queue, "a", 1, Place.FIRST, 16, cached={"w2": 1})
        [second] = await queue.dispatch([])
        assert second.worker_id == "w2"
        assert await requeue(queue, "a", 2, Place.FIRST, 16)
        [third] = await queue.dispatch([])
        assert third.worker_id == "w1"
        await finish(queue, "a")

    async def test_a_resumed_request_needs_what_it_needs_by_now(self, queue: Queue) -> None:
        await enqueue(queue, "a", blocks=3)
        await queue.dispatch([report("w1", blocks=4)])
        assert await requeue(queue, "a", 1, Place.FIRST, 70, blocks=5)
        assert await queue.dispatch() == []
        assert ids(await queue.dispatch([report("w1", seq=2, blocks=5)])) == ["a"]
        await finish(queue, "a")

    async def test_a_model_without_workers_blocks_no_other(self, queue: Queue) -> None:
        await enqueue(queue, "x", model="absent", band=Band.HIGH)
        await enqueue(queue, "y", model="m")
        await enqueue(queue, "z", model="other")
        claims = await queue.dispatch([report("w1", model="m"), report("w2", model="other")])
        assert {claim.request_id: claim.worker_id for claim in claims} == {"y": "w1", "z": "w2"}
        await finish(queue, *"xyz")

    async def test_a_worker_that_changed_its_model_serves_the_new_one(self, queue: Queue) -> None:
        await queue.dispatch([report(epoch=1, model="m")])
        await enqueue(queue, "old", model="m")
        await finish(queue, "old")
        await queue.dispatch([report(epoch=2, model="n")])
        await enqueue(queue, "a", model="m")
        await enqueue(queue, "b", model="n")
        assert ids(await queue.dispatch()) == ["b"]
        await finish(queue, "a", "b")


class TestReach:
    """A gateway that cannot submit to a worker gets no claims on it."""

    async def test_claims_are_made_on_reached_workers_only(self, make_queue: MakeQueue) -> None:
        one, two = make_queue("g1"), make_queue("g2")
        await one.reach(["w2"], ttl_s=60)
        await enqueue(one, "a", "b", owner="g1")
        await enqueue(two, "c", owner="g2")
        claims = await one.dispatch([report("w1"), report("w2", slots=1)])
        assert [(claim.request_id, claim.worker_id) for claim in claims] == [("a", "w2"), ("c", "w1")]
        await one.reach(["w1", "w2"], ttl_s=60)
        assert [(claim.request_id, claim.worker_id) for claim in await one.dispatch()] == [("b", "w1")]
        await finish(one, "a", "b")
        await finish(two, "c")

    async def test_who_reaches_none_gets_none(self, queue: Queue) -> None:
        await queue.reach([], ttl_s=60)
        await enqueue(queue, "a")
        assert await queue.dispatch([report()]) == []
        await queue.reach(["w1"], ttl_s=60)
        assert ids(await queue.dispatch()) == ["a"]
        await finish(queue, "a")

    async def test_what_was_said_long_ago_does_not_count(self, queue: Queue) -> None:
        await queue.reach([], ttl_s=0.05)
        await enqueue(queue, "a")

        async def claimed() -> list[Claim]:
            return await queue.dispatch([report()])

        assert ids(await eventually(claimed)) == ["a"]
        await finish(queue, "a")

    async def test_others_are_not_held_up_and_keep_no_worker_free_for_it(self, make_queue: MakeQueue) -> None:
        settings = replace(SETTINGS, max_passed=2, max_overtakes=2)
        one, two = make_queue("g1", settings), make_queue("g2", settings)
        await one.reach(["w2"], ttl_s=60)
        await enqueue(one, "a", "b", "c", owner="g1")
        names = [f"r{number}" for number in range(6)]
        await enqueue(two, *names, owner="g2")
        claims = await one.dispatch([report("w1", slots=6, max_num_seqs=6), report("w2", slots=0)])
        assert ids(claims) == names
        await finish(two, *names)
        await finish(one, "a", "b", "c")


class TestHeadThatDoesNotFit:
    async def test_it_is_overtaken_a_bounded_number_of_times_then_a_worker_is_kept_free(self, queue: Queue) -> None:
        await enqueue(queue, "big", blocks=80)
        await enqueue(queue, *"abcdef")
        claims = await queue.dispatch([report(slots=8, blocks=50, max_num_seqs=8)])
        assert ids(claims) == ["a", "b", "c"]
        await finish(queue, *"abc")
        assert await queue.dispatch([report(seq=2, slots=8, blocks=60, max_num_seqs=8)]) == []
        assert ids(await queue.dispatch([report(seq=3, slots=8, blocks=85, max_num_seqs=8)])) == ["big", "d", "e", "f"]
        await finish(queue, "big", *"def")

    async def test_lower_bands_overtake_it_no_more_often(self, queue: Queue) -> None:
        await enqueue(queue, "big", blocks=80, band=Band.HIGH)
        await enqueue(queue, *"abcdef", band=Band.LOW)
        assert ids(await queue.dispatch([report(slots=8, blocks=50, max_num_seqs=8)])) == ["a", "b", "c"]
        await finish(queue, "big", *"abcdef")

    async def test_the_other_workers_go_on(self, queue: Queue) -> None:
        await enqueue(queue, "big", blocks=80)
        await enqueue(queue, *"abcdef")
        workers = [
            report("w1", slots=8, blocks=50, max_num_seqs=8),
            report("w2", slots=8, blocks=70, max_num_seqs=8),
        ]
        claims = await queue.dispatch(workers)
        assert ids(claims) == [*"abcdef"]
        assert {claim.worker_id for claim in claims[3:]} == {"w1"}, "w2 is nearest to holding it, and is kept free"
        await finish(queue, "big", *"abcdef")

    async def test_once_claimed_its_patience_is_whole_again(self, queue: Queue) -> None:
        await enqueue(queue, "big", blocks=80)
        await enqueue(queue, "a", "b")
        assert ids(await queue.dispatch([report(blocks=50)])) == ["a", "b"]
        await finish(queue, "a", "b")
        assert ids(await queue.dispatch([report(seq=2, blocks=80)])) == ["big"]
        assert await requeue(queue, "big", 1, Place.SAME, 1, blocks=80)
        await enqueue(queue, *"cdef")
        assert ids(await queue.dispatch([report(seq=3, blocks=50)])) == ["c", "d", "e"]
        await finish(queue, "big", *"cdef")

    async def test_only_so_many_are_looked_past(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, max_passed=2))
        await enqueue(queue, "big", "bigger", blocks=80)
        await enqueue(queue, "small")
        assert await queue.dispatch([report(blocks=50)]) == []
        await finish(queue, "big")
        assert ids(await queue.dispatch()) == ["small"]
        await finish(queue, "bigger", "small")

    async def test_what_gets_its_only_worker_kept_free_is_one_of_them(self, make_queue: MakeQueue) -> None:
        settings = replace(SETTINGS, max_passed=2, max_overtakes=1)
        one, two = make_queue("g1", settings), make_queue("g2", settings)
        workers = [report("w1", blocks=50), report("w2", blocks=50)]
        await one.reach(["w2"], ttl_s=60)
        await enqueue(one, "big", owner="g1", blocks=80)
        await enqueue(two, "a", owner="g2", cached={"w2": 1})
        claims = await one.dispatch(workers)
        assert [(claim.request_id, claim.worker_id) for claim in claims] == [("a", "w2")], "its patience has ended"
        await enqueue(two, "bigger", owner="g2", blocks=80)
        await enqueue(two, "small", owner="g2")
        assert await two.dispatch() == []
        await finish(two, "bigger")
        claims = await two.dispatch()
        assert [(claim.request_id, claim.worker_id) for claim in claims] == [("small", "w1")]
        await finish(one, "big")
        await finish(two, "a", "small")

    async def test_what_no_worker_can_ever_hold_stops_nobody(self, queue: Queue) -> None:
        await enqueue(queue, "huge", blocks=101)
        await enqueue(queue, *"abcdefgh")
        assert len(await queue.dispatch([report(slots=8, max_num_seqs=8)])) == 8
        await finish(queue, "huge", *"abcdefgh")

    async def test_a_full_worker_is_not_an_overtaking(self, queue: Queue) -> None:
        await enqueue(queue, *"abc")
        assert await queue.dispatch([report(slots=0)]) == []
        assert ids(await queue.dispatch([report(seq=2, slots=3)])) == ["a", "b", "c"]
        await finish(queue, *"abc")


class TestLife:
    async def test_a_live_id_is_refused_and_keeps_its_place(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b")
        with pytest.raises(DuplicateRequestError):
            await queue.enqueue(entry("a", band=Band.HIGH), max_length=9)
        claims = await queue.dispatch([report()])
        assert ids(claims) == ["a", "b"]
        with pytest.raises(DuplicateRequestError):
            await queue.enqueue(entry("a"), max_length=9)
        await finish(queue, "a", "b")
        await enqueue(queue, "a")
        await finish(queue, "a")

    async def test_a_full_band_refuses_and_the_others_do_not(self, queue: Queue) -> None:
        await queue.enqueue(entry("a", model="m"), max_length=2)
        await queue.enqueue(entry("b", model="n"), max_length=2)
        with pytest.raises(LimitExceededError) as caught:
            await queue.enqueue(entry("c"), max_length=2)
        assert caught.value.reason is Reason.QUEUE_FULL
        assert await queue.owner_of("c") is None
        await queue.enqueue(entry("c", band=Band.LOW), max_length=2)
        await finish(queue, "a", "b", "c")

    async def test_one_that_needs_a_reservation_enters_with_it_only(
        self, queue: Queue, redis_url: str, pool: str, redis_client: redis.Redis
    ) -> None:
        limiter = RedisLimiter(redis_url, pool=pool, gateway_id="g1", clock=SystemClock(), uniform=lambda low, _: low)
        try:
            before = redis_client.keys(f"*{pool}*")
            assert not await queue.enqueue(entry("a", tenant="acme"), max_length=9, if_reserved=True)
            assert redis_client.keys(f"*{pool}*") == before, "a refusal writes nothing"
            await limiter.reserve("acme", "a", Cost(1, 1), TenantLimits(max_concurrent=1))
            assert await queue.enqueue(entry("a", tenant="acme"), max_length=9, if_reserved=True)
            assert ids(await queue.dispatch([report()])) == ["a"]
            await finish(queue, "a")
            await limiter.settle("acme", "a", num_prompt_tokens=1, num_output_tokens=1)
            assert not await queue.enqueue(entry("a", tenant="acme"), max_length=9, if_reserved=True)
        finally:
            await limiter.close()

    async def test_a_claim_makes_room_in_its_band(self, queue: Queue) -> None:
        await queue.enqueue(entry("a"), max_length=1)
        await queue.dispatch([report()])
        await queue.enqueue(entry("b"), max_length=1)
        await finish(queue, "a", "b")

    async def test_finish_is_idempotent_in_every_state(self, queue: Queue) -> None:
        assert not await queue.finish("never")
        await enqueue(queue, "waiting", "claimed", "accounted")
        await enqueue(queue, "left", band=Band.LOW)
        claims = await queue.dispatch([report(slots=3)])
        await queue.dispatch([report(seq=2, slots=0, accounted=claims[2:])])
        for request_id in ("waiting", "claimed", "accounted", "left"):
            assert await queue.finish(request_id)
            assert not await queue.finish(request_id)

    async def test_only_the_owner_finishes(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await enqueue(g1, "a")
        assert not await g2.finish("a")
        assert await g1.owner_of("a") == "g1"
        await finish(g1, "a")
        assert await g1.owner_of("a") is None

    async def test_requeue_of_anything_but_the_present_attempt_changes_nothing(self, queue: Queue) -> None:
        assert not await requeue(queue, "never", 1, Place.FIRST, 1)
        await enqueue(queue, "a", "b")
        assert not await requeue(queue, "a", 0, Place.FIRST, 1)
        await queue.dispatch([report(slots=1)])
        assert not await requeue(queue, "a", 2, Place.FIRST, 1)
        assert await requeue(queue, "a", 1, Place.SAME, 1)
        assert not await requeue(queue, "a", 1, Place.FIRST, 1)
        assert ids(await queue.dispatch([report(seq=2, slots=1)])) == ["a"]
        assert not await requeue(queue, "a", 1, Place.SAME, 1)
        await finish(queue, "a", "b")

    async def test_depths_count_the_waiting_and_time_the_head(self, queue: Queue) -> None:
        assert [(d.band, d.num_waiting, d.oldest_wait_s) for d in await queue.depths()] == [(b, 0, 0.0) for b in Band]
        await enqueue(queue, "a", "b", band=Band.HIGH)
        await enqueue(queue, "c", model="n", band=Band.HIGH)
        await enqueue(queue, "d", band=Band.LOW)
        high, normal, low = await queue.depths()
        assert (high.num_waiting, normal.num_waiting, low.num_waiting) == (3, 0, 1)
        assert high.oldest_wait_s > low.oldest_wait_s > 0
        await queue.dispatch([report()])
        assert [depth.num_waiting for depth in await queue.depths()] == [1, 0, 0]
        await finish(queue, *"abcd")


class TestInbox:
    async def test_claims_of_another_gateway_reach_its_inbox_once(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await enqueue(g2, "theirs", "too", owner="g2")
        await enqueue(g1, "mine", owner="g1")
        claims = await g1.dispatch([report()])
        assert [(claim.request_id, claim.owner) for claim in claims] == [
            ("theirs", "g2"),
            ("too", "g2"),
            ("mine", "g1"),
        ]
        expected = [InboxMessage("claim", claim.request_id, claim) for claim in claims[:2]]
        assert await g2.read_inbox(timeout_s=60) == expected
        assert await g2.read_inbox(timeout_s=0.02) == []
        assert await g1.read_inbox(timeout_s=0.02) == []
        await finish(g1, "mine")
        await finish(g2, "theirs", "too")

    async def test_a_cancel_goes_to_the_owner(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await enqueue(g1, "a")
        assert await g2.send_cancel("a")
        assert not await g2.send_cancel("never")
        assert await g1.read_inbox(timeout_s=60) == [InboxMessage("cancel", "a")]
        await finish(g1, "a")
        assert not await g2.send_cancel("a")

    async def test_a_waiting_reader_is_woken(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await enqueue(g1, "a")
        reading = asyncio.create_task(g1.read_inbox(timeout_s=60))
        await asyncio.sleep(0)
        await g2.send_cancel("a")
        assert await reading == [InboxMessage("cancel", "a")]
        await finish(g1, "a")

    async def test_nothing_is_lost_or_doubled_when_the_reader_is_cancelled(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        sent = [f"r{i}" for i in range(60)]
        await enqueue(g1, *sent)
        received: list[str] = []

        async def read_for_a_moment(moment_s: float) -> None:
            try:
                async with asyncio.timeout(moment_s):
                    received.extend(message.request_id for message in await g1.read_inbox(timeout_s=60))
            except TimeoutError:
                pass

        for i, request_id in enumerate(sent):
            await g2.send_cancel(request_id)
            await read_for_a_moment(0.0003 * (i % 5))
        while len(received) < len(sent):
            received.extend(message.request_id for message in await g1.read_inbox(timeout_s=60))
        assert received == sent
        await finish(g1, *sent)


class TestWorkers:
    async def test_announced_until_the_announcement_expires(self, queue: Queue) -> None:
        one = WorkerRecord("w1", 2**63 + 1, "host:1", "m", draining=False)
        two = WorkerRecord("w2", 1, "host:2", "n", draining=True)
        await queue.announce(two, ttl_s=60)
        await queue.announce(one, ttl_s=60)
        assert await queue.workers() == [one, two]
        await queue.announce(replace(one, draining=True), ttl_s=0.001)

        async def is_gone() -> bool:
            return await queue.workers() == [two]

        await eventually(is_gone)

    async def test_an_older_epoch_is_ignored_while_the_newer_is_known(self, queue: Queue) -> None:
        new = WorkerRecord("w1", 2**63 + 1, "host:2", "m", draining=False)
        old = WorkerRecord("w1", 2**63, "host:1", "m", draining=False)
        await queue.announce(new, ttl_s=60)
        await queue.announce(old, ttl_s=60)
        assert await queue.workers() == [new]


class TestReaping:
    async def test_a_dead_gateways_requests_claims_and_inbox_are_reaped(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await g1.heartbeat(ttl_s=60)
        await enqueue(g1, "claimed", "waiting")
        await g2.dispatch([report(slots=1)])
        await g1.heartbeat(ttl_s=0.001)  # its last words

        async def is_reaped() -> bool:
            await g2.heartbeat(ttl_s=60)
            return await g2.owner_of("claimed") is None and await g2.owner_of("waiting") is None

        await eventually(is_reaped)
        await enqueue(g2, "a", owner="g2")
        assert ids(await g2.dispatch()) == ["a"], "the slot of the dead gateway's claim is free again"
        assert sorted(await g1.heartbeat(ttl_s=60)) == ["claimed", "waiting"], "it lived on, and is told what it lost"
        await finish(g2, "a")

    async def test_a_dead_gateways_request_is_not_claimed(self, make_queue: MakeQueue) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await enqueue(g1, "a")
        await g1.heartbeat(ttl_s=0.001)

        async def is_dead() -> bool:
            return not await g2.send_cancel("a")

        await eventually(is_dead)
        await enqueue(g2, "b", owner="g2")
        assert ids(await g2.dispatch([report()])) == ["b"]
        assert await g2.owner_of("a") is None
        await finish(g2, "b")

    async def test_a_claim_that_nobody_accounts_for_is_undone_after_its_lease(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, claim_lease_s=0.001))
        await enqueue(queue, "a", "b")
        await queue.dispatch([report(slots=1)])

        async def claim_again() -> list[Claim]:
            assert await queue.heartbeat(ttl_s=60) == []
            return await queue.dispatch()

        (claim,) = await eventually(claim_again)
        assert claim.request_id == "a"
        assert claim.attempt > 1
        await finish(queue, "a", "b")

    async def test_an_accounted_claim_outlives_its_lease(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, claim_lease_s=0.05))
        await enqueue(queue, "a", "b")
        claims = await queue.dispatch([report(slots=2)])
        await queue.dispatch([report(seq=2, slots=0, accounted=claims[:1])])

        async def waiting() -> int:
            await queue.heartbeat(ttl_s=60)
            return (await queue.depths())[1].num_waiting

        assert await eventually(waiting) == 1
        assert ids(await queue.dispatch([report(seq=3, slots=2)])) == ["b"]
        assert await requeue(queue, "a", 1, Place.FIRST, 1), "still the present claim"
        await finish(queue, "a", "b")

    async def test_a_silent_workers_credit_goes(self, make_queue: MakeQueue) -> None:
        queue = make_queue("g1", replace(SETTINGS, report_ttl_s=0.02))
        await queue.dispatch([report(slots=400, max_num_seqs=400)])
        sent: list[str] = []

        async def is_refused() -> bool:
            sent.append(f"r{len(sent)}")
            await enqueue(queue, sent[-1])
            return await queue.dispatch() == []

        await eventually(is_refused)
        assert ids(await queue.dispatch([report(slots=400, max_num_seqs=400)])) == [sent[-1]], "the same numbers, alive"
        await finish(queue, *sent)

    async def test_a_gateway_that_closes_leaves_nothing_of_its_own(
        self, make_queue: MakeQueue, redis_client: redis.Redis, pool: str
    ) -> None:
        g1, g2 = make_queue("g1"), make_queue("g2")
        await g1.heartbeat(ttl_s=60)
        await enqueue(g1, "a")
        await g2.send_cancel("a")
        assert any(key.endswith(":inbox:g1") for key in pool_keys(redis_client, pool))
        await g1.close()
        left = {key.split("}:")[1]: redis_client.ttl(key) for key in pool_keys(redis_client, pool)}
        assert left.pop("sequence") == -1
        assert left.keys() == {"flow:2:acme:m"}, "what a flow was served is remembered for a while"
        assert 0 < left["flow:2:acme:m"] <= 600

    async def test_a_heartbeat_knows_every_live_request(self, queue: Queue) -> None:
        await enqueue(queue, "a", "b", "c")
        await queue.dispatch([report(slots=1)])
        assert await queue.heartbeat(ttl_s=60) == []
        await finish(queue, "a", "b", "c")
        assert await queue.heartbeat(ttl_s=60) == []
