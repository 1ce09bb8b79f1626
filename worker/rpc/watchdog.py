"""Keeps the worker's health truthful while it serves: a step that hangs turns it NOT_SERVING until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from worker.rpc.session import EngineLoop

_log = structlog.get_logger(__name__)

CHECK_INTERVAL_S = 1.0


async def watch_loop(engine: EngineLoop, max_age_s: float, set_serving: Callable[[bool], Awaitable[None]]) -> None:
    """Looks at the engine loop's age every second, until cancelled; `set_serving` is called when the answer changes."""
    is_serving = True
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        is_alive = engine.age_s <= max_age_s
        if is_alive != is_serving:
            is_serving = is_alive
            if is_alive:
                _log.info("engine_loop_recovered")
            else:
                _log.error("engine_loop_hangs", age_s=engine.age_s, max_age_s=max_age_s)
            await set_serving(is_alive)
