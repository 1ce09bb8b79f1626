"""Property tests of what many programs do to one store: random lives, each from one number, so that it can be told."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


class Life(Protocol):
    """Checks itself while it goes on, and counts what has happened in it."""

    happened: Counter[str]

    async def live(self) -> None: ...

    async def close(self) -> None: ...


def live_many(begin: Callable[[random.Random], Life], *, num_lives: int) -> Counter[str]:
    """What has happened in all of them together; `begin` gets a life's dice."""
    happened: Counter[str] = Counter()

    async def run(seed: int) -> None:
        life = begin(random.Random(seed))
        try:
            await life.live()
        finally:
            await life.close()
        happened.update(life.happened)

    @settings(max_examples=num_lives, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(seed=st.integers(0, 2**32 - 1))
    def any_life(seed: int) -> None:
        asyncio.run(run(seed))

    any_life()
    return happened
