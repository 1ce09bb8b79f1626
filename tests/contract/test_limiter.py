"""What every implementation of the `Limiter` port does, and what those do that limit; one body, run against each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import pytest_asyncio
import redis

from common.errors import LimitExceededError, UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost, Limiter, Unlimited
from gateway.admission.limits import NO_LIMITS, Remaining, TenantLimits
from gateway.store.redis_limiter import LimiterSettings, RedisLimiter
from tests.support.redis import pool_keys
from tests.support.store_clock import StoreClock, read_script_with_set_clock

MakeLimiter = Callable[[], Limiter]
LEASE_S = 10.0


@pytest.fixture
def clock(redis_client: redis.Redis, pool: str) -> StoreClock:
    return StoreClock(redis_client, pool)


@pytest_asyncio.fixture(params=["unlimited", "redis"])
async def make_limiter(
    request: pytest.FixtureRequest, redis_url: str, pool: str, clock: StoreClock
) -> AsyncIterator[MakeLimiter]:
    made: list[Limiter] = []

    def make() -> Limiter:
        made.append(
            Unlimited()
            if request.param == "unlimited"
            else RedisLimiter(
                redis_url,
                pool=pool,
                gateway_id=f"g{len(made)}",
                clock=clock,
                uniform=lambda low, _: low,
                settings=LimiterSettings(lease_s=LEASE_S),
                read_script=read_script_with_set_clock,
            )
        )
        return made[-1]

    yield make
    for limiter in made:
        await limiter.close()


@pytest.fixture
def limiter(make_limiter: MakeLimiter) -> Limiter:
    return make_limiter()


only_redis = pytest.mark.parametrize("make_limiter", ["redis"], indirect=True)


async def reserve(limiter: Limiter, request_id: str, tokens: int = 10, limits: TenantLimits = NO_LIMITS) -> Remaining:
    return await limiter.reserve("acme", request_id, Cost(tokens // 2, tokens - tokens // 2), limits)


async def settle(limiter: Limiter, request_id: str, tokens: int) -> None:
    await limiter.settle("acme", request_id, num_prompt_tokens=tokens // 2, num_output_tokens=tokens - tokens // 2)


async def refused(limiter: Limiter, request_id: str, tokens: int, limits: TenantLimits) -> LimitExceededError:
    with pytest.raises(LimitExceededError) as caught:
        await reserve(limiter, request_id, tokens, limits)
    assert [quota.subject for quota in caught.value.quotas] == ["tenant:acme"]
    return caught.value


async def test_without_limits_everything_is_admitted(limiter: Limiter) -> None:
    for i in range(50):
        assert await reserve(limiter, f"acme/{i}", 10**9) == Remaining()
    await limiter.renew()
    for i in range(50):
        await settle(limiter, f"acme/{i}", 5)
        await settle(limiter, f"acme/{i}", 5)
    await settle(limiter, "acme/never", 5)


@only_redis
class TestRequestsPerMinute:
    limits = TenantLimits(requests_per_minute=3)

    async def test_refuses_the_next_and_says_when_to_come_back(self, limiter: Limiter, clock: StoreClock) -> None:
        left = [(await reserve(limiter, f"acme/{i}", limits=self.limits)).requests_per_minute for i in range(3)]
        assert left == [2, 1, 0]
        clock.advance(20.25)
        error = await refused(limiter, "acme/late", 10, self.limits)
        assert error.reason is Reason.REQUEST_RATE
        assert error.retry_after_s is not None
        assert error.retry_after_s == pytest.approx(61 - 20.25)
        clock.advance(error.retry_after_s - 0.001)
        await refused(limiter, "acme/late", 10, self.limits)
        clock.advance(0.001)
        await reserve(limiter, "acme/late", limits=self.limits)

    async def test_nothing_hides_at_the_edge_of_a_minute(self, limiter: Limiter, clock: StoreClock) -> None:
        clock.set(clock.now_s // 60 * 60 + 59.9)
        for i in range(3):
            await reserve(limiter, f"acme/{i}", limits=self.limits)
        clock.advance(1.2)
        error = await refused(limiter, "acme/late", 10, self.limits)
        assert error.retry_after_s is not None
        assert 58.8 <= error.retry_after_s <= 59.8, "its own use frees it, not the minute's edge"

    async def test_a_settled_request_still_counts(self, limiter: Limiter) -> None:
        for i in range(3):
            await reserve(limiter, f"acme/{i}", limits=self.limits)
            await settle(limiter, f"acme/{i}", 0)
        await refused(limiter, "acme/4", 10, self.limits)

    async def test_one_charge_for_one_request(self, limiter: Limiter) -> None:
        for _ in range(5):
            await reserve(limiter, "acme/1", 10, TenantLimits(requests_per_minute=3, tokens_per_minute=25))
        left = await reserve(limiter, "acme/2", 10, TenantLimits(requests_per_minute=3, tokens_per_minute=25))
        assert left == Remaining(requests_per_minute=1, tokens_per_minute=5)

    async def test_tenants_do_not_share(self, limiter: Limiter) -> None:
        for i in range(3):
            await reserve(limiter, f"acme/{i}", limits=self.limits)
        left = await limiter.reserve("bolt", "bolt/1", Cost(1, 1), self.limits)
        assert left.requests_per_minute == 2

    async def test_an_edited_limit_counts_at_once(self, limiter: Limiter) -> None:
        await reserve(limiter, "acme/1")
        await reserve(limiter, "acme/2")
        await refused(limiter, "acme/3", 10, TenantLimits(requests_per_minute=2))
        await reserve(limiter, "acme/3", limits=TenantLimits(requests_per_minute=3))


@only_redis
class TestRequestsAtOnce:
    limits = TenantLimits(requests_per_minute=60, requests_at_once=3)

    async def test_after_so_many_they_come_one_by_one(self, limiter: Limiter, clock: StoreClock) -> None:
        for i in range(3):
            await reserve(limiter, f"acme/{i}", limits=self.limits)
        for i in range(3, 6):
            error = await refused(limiter, f"acme/{i}", 10, self.limits)
            assert (error.reason, error.retry_after_s) == (Reason.REQUEST_RATE, pytest.approx(1.0))
            assert "3 of them at once" in error.message
            clock.advance(0.999)
            await refused(limiter, f"acme/{i}", 10, self.limits)
            clock.advance(0.001)
            await reserve(limiter, f"acme/{i}", limits=self.limits)

    async def test_a_pause_saves_up_no_more_than_that(self, limiter: Limiter, clock: StoreClock) -> None:
        await reserve(limiter, "acme/0", limits=self.limits)
        clock.advance(3600)
        for i in range(1, 4):
            await reserve(limiter, f"acme/{i}", limits=self.limits)
        await refused(limiter, "acme/4", 10, self.limits)

    async def test_the_minute_holds_whatever_the_pace(self, limiter: Limiter, clock: StoreClock) -> None:
        """A bucket alone would let 3 + 60 pass in the first minute."""
        num_admitted = 0
        for i in range(600):
            try:
                await reserve(limiter, f"acme/{i}", limits=self.limits)
                num_admitted += 1
            except LimitExceededError:
                pass
            clock.advance(0.1)
        assert num_admitted == 60

    async def test_other_refusals_take_nothing_of_it(self, limiter: Limiter) -> None:
        limits = replace(self.limits, tokens_per_minute=30)
        for i in range(5):
            await refused(limiter, f"acme/{i}", 31, limits)
        for i in range(3):
            await reserve(limiter, f"acme/ok/{i}", 10, limits)

    async def test_none_at_once_is_none_at_all(self, limiter: Limiter) -> None:
        limits = TenantLimits(requests_per_minute=60, requests_at_once=0)
        assert (await refused(limiter, "acme/1", 10, limits)).retry_after_s is None


@only_redis
class TestTokensPerMinute:
    limits = TenantLimits(tokens_per_minute=1000)

    async def test_all_that_a_request_may_use_counts_until_it_has_ended(
        self, limiter: Limiter, clock: StoreClock
    ) -> None:
        assert (await reserve(limiter, "acme/1", 700, self.limits)).tokens_per_minute == 300
        error = await refused(limiter, "acme/2", 301, self.limits)
        assert error.reason is Reason.TOKEN_RATE
        assert error.retry_after_s == pytest.approx(61)
        await settle(limiter, "acme/1", 120)
        assert (await reserve(limiter, "acme/2", 301, self.limits)).tokens_per_minute == 579

    async def test_a_refund_counts_where_the_use_was_counted(self, limiter: Limiter, clock: StoreClock) -> None:
        """Use that has left the window has nothing to give back to later use."""
        await reserve(limiter, "acme/1", 1000, self.limits)
        clock.advance(61)
        await reserve(limiter, "acme/2", 1000, self.limits)
        await settle(limiter, "acme/1", 0)
        await refused(limiter, "acme/3", 1, self.limits)

    async def test_the_wait_is_for_as_much_as_is_needed(self, limiter: Limiter, clock: StoreClock) -> None:
        for i, tokens in enumerate((500, 300, 200)):
            await reserve(limiter, f"acme/{i}", tokens, self.limits)
            clock.advance(10)
        waits = [(await refused(limiter, "acme/x", tokens, self.limits)).retry_after_s for tokens in (500, 501, 801)]
        assert waits == pytest.approx([31, 41, 51])

    async def test_what_can_never_pass_is_not_told_to_come_back(self, limiter: Limiter) -> None:
        assert (await refused(limiter, "acme/1", 1001, self.limits)).retry_after_s is None

    async def test_a_refusal_writes_nothing(self, limiter: Limiter, redis_client: redis.Redis, pool: str) -> None:
        limits = TenantLimits(tokens_per_minute=1000, requests_per_minute=1, max_concurrent=1, tokens_per_day=5000)
        await refused(limiter, "acme/1", 1001, limits)
        assert [key.split("}:")[1] for key in pool_keys(redis_client, pool)] == ["clock"]
        await reserve(limiter, "acme/1", 10, limits)
        before = {key: redis_client.dump(key) for key in pool_keys(redis_client, pool)}
        await refused(limiter, "acme/2", 10, limits)
        assert {key: redis_client.dump(key) for key in pool_keys(redis_client, pool)} == before


@only_redis
class TestConcurrency:
    limits = TenantLimits(max_concurrent=2)

    async def test_an_ended_request_makes_room(self, limiter: Limiter) -> None:
        assert (await reserve(limiter, "acme/1", limits=self.limits)).concurrent == 1
        assert (await reserve(limiter, "acme/2", limits=self.limits)).concurrent == 0
        error = await refused(limiter, "acme/3", 10, self.limits)
        assert error.reason is Reason.CONCURRENCY
        assert error.retry_after_s is not None
        await settle(limiter, "acme/1", 0)
        await reserve(limiter, "acme/3", limits=self.limits)

    async def test_where_nothing_is_allowed_nobody_is_told_to_come_back(self, limiter: Limiter) -> None:
        for limits in (TenantLimits(max_concurrent=0), TenantLimits(requests_per_minute=0)):
            assert (await refused(limiter, "acme/1", 10, limits)).retry_after_s is None

    async def test_slots_of_a_dead_gateway_come_back(self, make_limiter: MakeLimiter, clock: StoreClock) -> None:
        dead, living = make_limiter(), make_limiter()
        await reserve(dead, "acme/1", limits=self.limits)
        await reserve(living, "acme/2", limits=self.limits)
        clock.advance(LEASE_S - 1)
        await living.renew()
        await refused(living, "acme/3", 10, self.limits)
        clock.advance(1)
        assert (await reserve(living, "acme/3", limits=self.limits)).concurrent == 0

    async def test_a_gateway_that_was_only_slow_takes_its_slots_up_again(
        self, make_limiter: MakeLimiter, clock: StoreClock
    ) -> None:
        slow, other = make_limiter(), make_limiter()
        await reserve(slow, "acme/1", limits=self.limits)
        clock.advance(LEASE_S + 1)
        await slow.renew()
        assert (await reserve(other, "acme/2", limits=self.limits)).concurrent == 0
        await settle(slow, "acme/1", 0)
        await slow.renew()
        assert (await reserve(other, "acme/3", limits=self.limits)).concurrent == 0

    async def test_a_cancelled_reservation_is_undone(self, limiter: Limiter, clock: StoreClock) -> None:
        task = asyncio.create_task(reserve(limiter, "acme/1", limits=TenantLimits(max_concurrent=1)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            while True:
                try:
                    await reserve(limiter, "acme/2", limits=TenantLimits(max_concurrent=1))
                    break
                except LimitExceededError:  # not yet undone
                    await asyncio.sleep(0.001)


@only_redis
async def test_a_store_that_comes_back_empty_counts_what_runs(
    make_limiter: MakeLimiter, clock: StoreClock, redis_client: redis.Redis, pool: str
) -> None:
    limits = TenantLimits(max_concurrent=2, tokens_per_minute=100, tokens_per_day=100)
    limiter, other = make_limiter(), make_limiter()
    await reserve(limiter, "acme/1", 40, limits)
    await reserve(limiter, "acme/2", 40, limits)
    await settle(limiter, "acme/2", 40)
    redis_client.delete(*pool_keys(redis_client, pool))
    clock.advance(1)
    await limiter.renew()
    await limiter.renew()
    left = await reserve(other, "acme/3", 10, limits)
    assert left == Remaining(tokens_per_minute=50, concurrent=0, tokens_today=50)
    await settle(limiter, "acme/1", 5)
    await limiter.renew()
    left = await reserve(other, "acme/4", 10, limits)
    assert left == Remaining(tokens_per_minute=75, concurrent=0, tokens_today=75)


@only_redis
async def test_after_an_outage_that_slots_may_not_have_survived_nothing_is_granted_before_all_have_told(
    make_limiter: MakeLimiter, clock: StoreClock
) -> None:
    limits = TenantLimits(max_concurrent=1)
    quick, slow = make_limiter(), make_limiter()
    await reserve(slow, "acme/1", limits=limits)
    for limiter in (quick, slow):
        await limiter.renew()
    clock.advance(LEASE_S + 1)
    with pytest.raises(UnavailableError):
        await reserve(quick, "acme/2", limits=limits)  # nobody has renewed yet
    await quick.renew()
    with pytest.raises(UnavailableError) as caught:
        await reserve(quick, "acme/2", limits=limits)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert caught.value.retry_after_s is not None
    assert await reserve(quick, "acme/3") == Remaining(), "who has no limits need not wait"
    await settle(quick, "acme/3", 0)
    for _ in range(2):
        await slow.renew()
        clock.advance(3)
    await refused(quick, "acme/2", 10, limits)


@only_redis
async def test_use_of_a_share_is_charged_once_and_others_give_theirs_back_to_who_needs_it(
    make_limiter: MakeLimiter, redis_client: redis.Redis
) -> None:
    limits = TenantLimits(tokens_per_day=10_000)
    one, other = make_limiter(), make_limiter()
    for number, limiter in enumerate((one, other)):
        await reserve(limiter, f"acme/{number}", 10, limits)
        await limiter.renew()
    with pytest.raises(UnavailableError):
        await one.reserve("acme", "acme/large", Cost(0, 5000), limits, patience_s=0)
    left = await one.reserve("acme", "acme/local", Cost(0, 200), limits, patience_s=0)
    assert left.tokens_today is not None
    assert left.tokens_today > 0, "left of the share"
    await settle(one, "acme/local", 150)
    assert await one.remaining({"acme": limits}) == [Remaining(tokens_today=9980)]
    redis_client.script_flush()
    for _ in range(2):
        await one.renew()
    assert await other.remaining({"acme": limits}) == [Remaining(tokens_today=9830)]
    error = await refused(other, "acme/rest", 9830, limits)
    assert error.retry_after_s is not None, "a share is in the way"
    for limiter in (one, one):  # told, then known to be told
        await limiter.renew()
    assert (await reserve(other, "acme/rest", 9830, limits)).tokens_today == 0


@only_redis
class TestTokensPerDay:
    async def test_a_spent_budget_is_refused_until_the_day_ends(self, limiter: Limiter, clock: StoreClock) -> None:
        limits = TenantLimits(tokens_per_day=1000)
        clock.set(datetime(2027, 3, 1, 22, 0, tzinfo=UTC).timestamp())
        await reserve(limiter, "acme/1", 900, limits)
        error = await refused(limiter, "acme/2", 101, limits)
        assert (error.reason, error.retry_after_s) == (Reason.DAILY_BUDGET, None)
        await settle(limiter, "acme/1", 400)
        assert (await reserve(limiter, "acme/2", 500, limits)).tokens_today == 100
        clock.set(datetime(2027, 3, 1, 23, 59, 59, tzinfo=UTC).timestamp())
        await refused(limiter, "acme/3", 101, limits)
        clock.advance(1)
        assert (await reserve(limiter, "acme/3", 1000, limits)).tokens_today == 0

    async def test_yesterdays_refund_is_not_todays(self, limiter: Limiter, clock: StoreClock) -> None:
        limits = TenantLimits(tokens_per_day=1000)
        clock.set(datetime(2027, 3, 1, 23, 59, 59, tzinfo=UTC).timestamp())
        await reserve(limiter, "acme/1", 1000, limits)
        clock.advance(2)
        await reserve(limiter, "acme/2", 600, limits)
        await settle(limiter, "acme/1", 0)
        assert (await reserve(limiter, "acme/3", 400, limits)).tokens_today == 0

    @pytest.mark.parametrize(
        ("midnight", "zone"),
        [
            (datetime(2027, 3, 1, 23, 0, tzinfo=UTC), "Europe/Berlin"),
            (datetime(2027, 7, 1, 22, 0, tzinfo=UTC), "Europe/Berlin"),
            (datetime(2027, 3, 1, 18, 30, tzinfo=UTC), "Asia/Kolkata"),
            (datetime(2027, 3, 1, 8, 0, tzinfo=UTC), "America/Los_Angeles"),
        ],
    )
    async def test_the_day_is_the_tenants(
        self, limiter: Limiter, clock: StoreClock, midnight: datetime, zone: str
    ) -> None:
        limits = TenantLimits(tokens_per_day=1000, time_zone=zone)
        clock.set(midnight.timestamp() - 1)
        await reserve(limiter, "acme/1", 1000, limits)
        await refused(limiter, "acme/2", 1, limits)
        clock.advance(1)
        await reserve(limiter, "acme/2", 1000, limits)
        clock.set(midnight.timestamp() + 86399)
        assert (await refused(limiter, "acme/3", 1, limits)).reason is Reason.DAILY_BUDGET

    async def test_what_was_spent_stays_spent_when_the_budget_is_edited(self, limiter: Limiter) -> None:
        await reserve(limiter, "acme/1", 900)
        await refused(limiter, "acme/2", 10, TenantLimits(tokens_per_day=500))
        left = await reserve(limiter, "acme/2", 10, TenantLimits(tokens_per_day=2000))
        assert left.tokens_today == 1090


@only_redis
@pytest.mark.parametrize(
    "limits",
    [
        TenantLimits(requests_per_minute=10),
        TenantLimits(max_concurrent=10),
        TenantLimits(tokens_per_minute=109),
        TenantLimits(tokens_per_day=100),
        TenantLimits(requests_per_minute=12, tokens_per_minute=130, max_concurrent=10, tokens_per_day=110),
    ],
)
async def test_of_a_hundred_at_once_through_two_gateways_ten_are_admitted(
    make_limiter: MakeLimiter, limits: TenantLimits
) -> None:
    gateways = [make_limiter(), make_limiter()]
    answers = await asyncio.gather(
        *(reserve(gateways[i % 2], f"acme/{i}", 10, limits) for i in range(100)), return_exceptions=True
    )
    assert sum(isinstance(answer, Remaining) for answer in answers) == 10
    assert all(isinstance(answer, Remaining | LimitExceededError) for answer in answers)


@only_redis
async def test_the_longest_wait_is_told_and_none_if_the_day_is_over(limiter: Limiter, clock: StoreClock) -> None:
    limits = TenantLimits(requests_per_minute=1, max_concurrent=1)
    await reserve(limiter, "acme/1", 10, limits)
    error = await refused(limiter, "acme/2", 10, limits)
    assert error.reason is Reason.REQUEST_RATE
    assert error.retry_after_s == pytest.approx(61)
    error = await refused(limiter, "acme/2", 10, TenantLimits(requests_per_minute=1, tokens_per_day=15))
    assert (error.reason, error.retry_after_s) == (Reason.DAILY_BUDGET, None)


@only_redis
async def test_everything_of_an_ended_request_expires(limiter: Limiter, redis_client: redis.Redis, pool: str) -> None:
    await reserve(limiter, "acme/1")
    await limiter.renew()
    await settle(limiter, "acme/1", 3)
    left = {key.split("}:")[1]: redis_client.ttl(key) for key in pool_keys(redis_client, pool)}
    del left["clock"]
    assert left.keys() == {"window:acme", "day:acme", "limits"}
    assert all(ttl > 0 for ttl in left.values())


@only_redis
async def test_a_late_settlement_leaves_nothing_behind(limiter: Limiter, redis_client: redis.Redis, pool: str) -> None:
    await reserve(limiter, "acme/1")
    redis_client.delete(*(key for key in pool_keys(redis_client, pool) if ":window:" in key or ":day:" in key))
    await settle(limiter, "acme/1", 3)
    assert [key.split("}:")[1] for key in pool_keys(redis_client, pool)] == ["clock"]
