"""Random lives of a tenant at gateways that lose the store: whatever happens, the fleet stays within every limit."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from common.errors import LimitExceededError, UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost
from gateway.admission.limits import TenantLimits
from gateway.store.connection import Argument
from gateway.store.redis_limiter import LimiterSettings, RedisLimiter
from tests.support.lives import live_many
from tests.support.redis import check_window_sums, pool_keys
from tests.support.store_clock import StoreClock, read_script_with_set_clock

NUM_STEPS = 120
NUM_GATEWAYS = 3
OUTAGE_S = 200.0
SETTLING_S = 6.0
LEASE_S = 1e6  # slots that expire while their gateway is away are for another test


class FaultyLimiter(RedisLimiter):
    """Its calls may be lost on the way there, or on the way back, or reach the store long after they were given up."""

    fault = ""
    late: list[tuple[str, tuple[Argument, ...]]]

    def _send(self, name: str, *arguments: Argument) -> asyncio.Future[Any]:
        if not self.fault or name == "settle":
            return super()._send(name, *arguments)
        answer = asyncio.get_running_loop().create_future()
        error = UnavailableError(self.fault, reason=Reason.STORE_UNAVAILABLE)
        if self.fault == "unanswered":
            super()._send(name, *arguments).add_done_callback(lambda _: answer.set_exception(error))
            return answer
        if self.fault == "late" and name in ("reserve", "share"):
            self.late.append((name, arguments))
        answer.set_exception(error)
        return answer

    async def arrive(self) -> None:
        """What was late reaches the store."""
        late, self.late = self.late, []
        for name, arguments in late:
            await super()._send(name, *arguments)


@dataclass
class Admitted:
    """A request as the limits must see it."""

    request_id: str
    at_s: float
    tokens: int
    gateway: int
    is_running: bool = True


class Life:
    """Gateways serve one tenant; the dice say what happens next."""

    def __init__(self, url: str, client: redis.Redis, dice: random.Random) -> None:
        self.dice = dice
        self.pool = f"test-{secrets.token_hex(6)}"
        self.client = client
        self.clock = StoreClock(client, self.pool)
        self.happened: Counter[str] = Counter()
        self.gateways = [
            FaultyLimiter(
                url,
                pool=self.pool,
                gateway_id=f"g{number}",
                clock=self.clock,
                uniform=lambda low, _: low,
                settings=LimiterSettings(lease_s=LEASE_S, outage_share=0.6, outage_s=OUTAGE_S),
                on_share_used=lambda: self.happened.update(["by share"]),
                read_script=read_script_with_set_clock,
            )
            for number in range(NUM_GATEWAYS)
        ]
        for gateway in self.gateways:
            gateway.late = []
            client.zadd(f"tidegate:{{{self.pool}}}:gateways", {repr(gateway): 1e16})
        self.limits = TenantLimits(
            requests_per_minute=dice.choice([None, 5, 12, 40]),
            tokens_per_minute=dice.choice([None, 300, 2000]),
            max_concurrent=dice.choice([None, 5, 12, 40]),
            tokens_per_day=dice.choice([None, 2000, 8000]),
        )
        self.admitted: list[Admitted] = []
        self.num_requests = 0

    def used(self, now: float) -> tuple[int, int, int, int]:
        """Requests and tokens of the last minute, running requests, tokens of today in UTC."""
        late = [it for it in self.admitted if it.at_s > now - 60]
        today = [it.tokens for it in self.admitted if it.at_s // 86400 == now // 86400]
        running = sum(it.is_running for it in self.admitted)
        return len(late), sum(it.tokens for it in late), running, sum(today)

    def check(self) -> None:
        limits = self.limits
        bounds = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent, limits.tokens_per_day)
        for bound, number in zip(bounds, self.used(self.clock.now_s), strict=True):
            assert bound is None or number <= bound, (limits, self.used(self.clock.now_s))

    async def reserve(self, gateway: int | None = None) -> bool:
        self.num_requests += 1
        number = self.dice.randrange(NUM_GATEWAYS) if gateway is None else gateway
        request_id, tokens = f"acme/{self.num_requests}", self.dice.randint(1, 150)
        patience_s = self.dice.choice([0.0, 60.0])
        try:
            await self.gateways[number].reserve("acme", request_id, Cost(0, tokens), self.limits, patience_s=patience_s)
        except LimitExceededError as error:
            self.happened[error.reason.name] += 1
            return False
        except UnavailableError:
            self.happened["unavailable"] += 1
            return False
        self.admitted.append(Admitted(request_id, self.clock.now_s, tokens, number))
        self.check()
        self.happened["admitted"] += 1
        return True

    async def settle(self) -> None:
        running = [it for it in self.admitted if it.is_running]
        if running:
            one = self.dice.choice(running)
            used = self.dice.randint(0, one.tokens)
            with suppress(UnavailableError):
                await self.gateways[one.gateway].settle(
                    "acme", one.request_id, num_prompt_tokens=0, num_output_tokens=used
                )
            one.tokens, one.is_running = used, False

    async def renew(self) -> None:
        try:
            await self.dice.choice(self.gateways).renew()
        except UnavailableError:
            self.happened["not renewed"] += 1

    async def fail(self) -> None:
        self.dice.choice(self.gateways).fault = self.dice.choice(["", "", "lost", "late", "unanswered"])

    async def arrive(self) -> None:
        await self.dice.choice(self.gateways).arrive()

    async def fail_for_all(self) -> None:
        for gateway in self.gateways:
            gateway.fault = "lost"

    async def wait(self) -> None:
        self.clock.advance(self.dice.choice([0.001, 0.3, 1.0, 7.5, 20.0, 61.0, OUTAGE_S / 2]))

    async def sleep_till_midnight(self) -> None:
        self.clock.set((self.clock.now_s // 86400 + 1) * 86400 - self.dice.choice([0.0, 0.5, 30.0]))

    async def forget(self) -> None:
        """The store comes back empty. Every gateway hears of it soon."""
        for key in pool_keys(self.client, self.pool):
            if not key.endswith((":clock", ":gateways")):
                self.client.delete(key)
        self.happened["forgotten"] += 1
        for gateway in self.dice.sample(self.gateways, NUM_GATEWAYS):
            gateway.late.clear()  # they went with the former server
            await self.reserve()
            gateway.fault = ""
            await gateway.renew()
            await self.reserve()
        self.clock.advance(SETTLING_S)

    async def live(self) -> None:
        for gateway in self.gateways:
            await gateway.renew()
        steps = {
            self.reserve: 14,
            self.settle: 6,
            self.renew: 8,
            self.wait: 2,
            self.fail: 2,
            self.fail_for_all: 0.3,
            self.arrive: 2,
            self.sleep_till_midnight: 0.3,
            self.forget: 0.4,
        }
        for step in self.dice.choices(list(steps), list(steps.values()), k=NUM_STEPS):
            await step()
            check_window_sums(self.client, self.pool, "acme")
        await self.recover()

    async def recover(self) -> None:
        """Once all is well again, one gateway gets the whole limit."""
        for gateway in self.gateways:
            gateway.late.clear()
            gateway.fault = ""
        while any(it.is_running for it in self.admitted):
            await self.settle()
        for _ in range(4):
            for gateway in self.gateways:
                await gateway.renew()
            self.clock.advance(0.4 * LEASE_S)  # by then the slots are back of those who came too late to be settled
        limits = self.limits
        most = min((it for it in (limits.requests_per_minute, limits.max_concurrent) if it is not None), default=None)
        tokens = limits.max_request_tokens
        if most is None:
            return
        num_admitted = 0
        for number in range(2 * most):
            try:
                await self.gateways[0].reserve("acme", f"acme/last/{number}", Cost(0, 1), limits)
                num_admitted += 1
            except LimitExceededError:
                for gateway in self.gateways:
                    await gateway.renew()
        assert num_admitted == (most if tokens is None else min(most, tokens))

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for key in pool_keys(self.client, self.pool):
            self.client.delete(key)


def test_no_loss_of_the_store_lets_more_through_than_the_limits(redis_url: str, redis_client: redis.Redis) -> None:
    happened = live_many(lambda dice: Life(redis_url, redis_client, dice), num_lives=25)
    assert happened.keys() >= {"admitted", "by share", "unavailable", "REQUEST_RATE", "TOKEN_RATE", "forgotten"}


@pytest.mark.parametrize("is_dead", [False, True])
async def test_what_runs_by_a_share_has_its_slot_for_as_long_as_any_other_of_a_gateway_that_is_away(
    redis_url: str, redis_client: redis.Redis, is_dead: bool
) -> None:
    life = Life(redis_url, redis_client, random.Random(0))
    limits = TenantLimits(max_concurrent=10)
    away, here = life.gateways[:2]
    requests = (f"acme/{number}" for number in range(100))

    async def reserve_all() -> int:
        """How many more are admitted here."""
        num_admitted = 0
        with suppress(LimitExceededError):
            while True:
                await here.reserve("acme", next(requests), Cost(0, 1), limits)
                num_admitted += 1
        return num_admitted

    try:
        for gateway in (away, here):
            await gateway.renew()
        await away.reserve("acme", "acme/by-store", Cost(0, 1), limits)
        await away.renew()
        set_aside = away.held("acme").concurrent
        away.fault = "lost"
        for number in range(set_aside):
            await away.reserve("acme", f"acme/by-share/{number}", Cost(0, 1), limits, patience_s=0)
        life.clock.advance(86400.0)
        await here.renew()
        assert await reserve_all() == 10 - 1 - set_aside
        if is_dead:
            life.clock.advance(LEASE_S + OUTAGE_S)
            await here.renew()
            life.clock.advance(SETTLING_S)
            assert await reserve_all() == 1 + set_aside
        else:
            away.fault = ""
            for _ in range(2):
                await away.renew()
            assert await reserve_all() == 0, "what was set aside is in use"
            await away.settle("acme", "acme/by-share/0", num_prompt_tokens=0, num_output_tokens=1)
            assert await reserve_all() == 1
    finally:
        await life.close()
