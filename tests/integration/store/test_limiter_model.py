"""Random lives of a tenant's requests against a naive statement of its limits."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from dataclasses import dataclass

import redis

from common.errors import LimitExceededError, UnavailableError
from common.types import Reason
from gateway.admission.limiter import Cost
from gateway.admission.limits import TenantLimits
from gateway.store.redis_limiter import LimiterSettings, RedisLimiter
from tests.support.lives import live_many
from tests.support.redis import check_window_sums, pool_keys
from tests.support.store_clock import StoreClock, read_script_with_set_clock

NUM_STEPS = 120
LEASE_S = 15.0
BEAT_S = 3.0


@dataclass
class Admitted:
    """A request as the limits must see it."""

    request_id: str
    at_s: float
    tokens: int
    gateway: int
    leased_until_s: float
    is_running: bool = True


class Life:
    """Two gateways serve one tenant; the dice say what happens next."""

    def __init__(self, url: str, client: redis.Redis, dice: random.Random) -> None:
        self.dice = dice
        self.pool = f"test-{secrets.token_hex(6)}"
        self.client = client
        self.clock = StoreClock(client, self.pool)
        self.gateways = [
            RedisLimiter(
                url,
                pool=self.pool,
                gateway_id=f"g{number}",
                clock=self.clock,
                uniform=lambda low, _: low,
                settings=LimiterSettings(lease_s=LEASE_S, outage_share=0.0),
                read_script=read_script_with_set_clock,
            )
            for number in range(2)
        ]
        some = [None, *range(3, 12)]
        self.limits = TenantLimits(
            requests_per_minute=dice.choice(some),
            tokens_per_minute=dice.choice([None, 300, 1000]),
            max_concurrent=dice.choice(some),
            tokens_per_day=dice.choice([None, 2000, 5000]),
        )
        self.admitted: list[Admitted] = []
        self.happened: Counter[str] = Counter()
        self.num_requests = 0

    def used(self, window_s: float) -> tuple[int, int, int, int]:
        """Requests and tokens within so many seconds before now, running requests, tokens of today in UTC."""
        now = self.clock.now_s
        late = [it for it in self.admitted if it.at_s > now - window_s]
        running = [it for it in self.admitted if it.is_running and it.leased_until_s > now]
        today = [it.tokens for it in self.admitted if it.at_s // 86400 == now // 86400]
        return len(late), sum(it.tokens for it in late), len(running), sum(today)

    def is_over(self, used: tuple[int, int, int, int]) -> bool:
        limits = self.limits
        bounds = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent, limits.tokens_per_day)
        return any(bound is not None and number > bound for number, bound in zip(used, bounds, strict=True))

    async def reserve(self) -> None:
        self.num_requests += 1
        request_id, tokens = f"acme/{self.num_requests}", self.dice.randint(1, 350)
        gateway = self.dice.randrange(2)
        try:
            await self.gateways[gateway].reserve("acme", request_id, Cost(0, tokens), self.limits)
        except LimitExceededError as error:
            requests, used, running, today = self.used(61.0)
            assert self.is_over((requests + 1, used + tokens, running + 1, today + tokens)), "refused for nothing"
            self.happened[error.reason.name] += 1
            await self.come_back(error, tokens)
            return
        except UnavailableError:  # nobody has renewed for long: the store waits for what gateways may have to tell
            self.happened["unsettled"] += 1
            return
        until_s = self.clock.now_s + LEASE_S
        self.admitted.append(Admitted(request_id, self.clock.now_s, tokens, gateway, until_s))
        assert not self.is_over(self.used(60.0)), "admitted more than a limit allows"
        self.happened["admitted"] += 1

    async def come_back(self, error: LimitExceededError, tokens: int) -> None:
        """By the time that was told the rate limits let the request pass."""
        if error.retry_after_s is None or self.dice.random() < 0.5:
            return
        await self.live_for(error.retry_after_s + 1e-5, self.dice.randrange(2))  # the clock of the test is a float
        reason = None
        try:
            await self.gateways[0].reserve("acme", "acme/again", Cost(0, tokens), self.limits)
        except LimitExceededError as again:
            reason = again.reason
        except UnavailableError:
            return
        else:
            await self.gateways[0].settle("acme", "acme/again", num_prompt_tokens=0, num_output_tokens=0)
            self.admitted.append(Admitted("", self.clock.now_s, 0, 0, 0.0, is_running=False))
        assert reason in (None, Reason.CONCURRENCY, Reason.DAILY_BUDGET)

    async def settle(self) -> None:
        running = [it for it in self.admitted if it.is_running]
        if running:
            one = self.dice.choice(running)
            used = self.dice.randint(0, one.tokens)
            for _ in range(2):
                await self.gateways[one.gateway].settle(
                    "acme", one.request_id, num_prompt_tokens=0, num_output_tokens=used
                )
            one.tokens, one.is_running = used, False

    async def renew(self) -> None:
        await self.renew_at(self.dice.randrange(2))

    async def renew_at(self, gateway: int) -> None:
        await self.gateways[gateway].renew()
        for one in self.admitted:
            if one.gateway == gateway and one.is_running:
                one.leased_until_s = self.clock.now_s + LEASE_S

    async def live_for(self, seconds: float, gateway: int) -> None:
        """Time passes in which one gateway goes on."""
        while seconds > BEAT_S:
            self.clock.advance(BEAT_S)
            await self.renew_at(gateway)
            seconds -= BEAT_S
        self.clock.advance(seconds)

    async def wait(self) -> None:
        seconds = self.dice.choice([0.001, 0.3, 1.0, 7.5, 20.0, 61.0, self.dice.uniform(0, 60)])
        if self.dice.random() < 0.2:
            self.clock.advance(seconds)
        else:
            await self.live_for(seconds, self.dice.randrange(2))

    async def sleep_till_midnight(self) -> None:
        self.clock.set((self.clock.now_s // 86400 + 1) * 86400 - self.dice.choice([0.0, 0.5, 30.0]))

    async def live(self) -> None:
        steps = {self.reserve: 10, self.settle: 6, self.renew: 3, self.wait: 5, self.sleep_till_midnight: 0.3}
        for step in self.dice.choices(list(steps), list(steps.values()), k=NUM_STEPS):
            await step()
            check_window_sums(self.client, self.pool, "acme")

    async def close(self) -> None:
        for gateway in self.gateways:
            await gateway.close()
        for key in pool_keys(self.client, self.pool):
            self.client.delete(key)


def test_no_sixty_seconds_hold_more_than_the_limit(redis_url: str, redis_client: redis.Redis) -> None:
    happened = live_many(lambda dice: Life(redis_url, redis_client, dice), num_lives=25)
    assert happened.keys() >= {"admitted", "REQUEST_RATE", "TOKEN_RATE", "CONCURRENCY", "DAILY_BUDGET"}
