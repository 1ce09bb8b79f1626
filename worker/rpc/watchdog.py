"""Keeps the worker's health truthful while it serves: a step that hangs turns it NOT_SERVING until it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from worker.rpc.session import EngineLoop

_log = structlog.get_logger(__name__)

CHECK_INTERVAL_S = 1.0


async def watch_loop(engine: EngineLoop, max_age_s: float, set_serving: Callable[[bool], Awaitable[None]]) -> None:
    """Looks at the engine loop's age every second, until cancelled; `set_serving` is called when the answer changes.

    By how much a look is late, this whole process stood still: that is no fault of the loop's.
    """
    clock = asyncio.get_running_loop().time
    is_serving, excused_s = True, 0.0
    while True:
        began = clock()
        await asyncio.sleep(CHECK_INTERVAL_S)
        passed_s, age_s = clock() - began, engine.age_s
        excused_s = passed_s - CHECK_INTERVAL_S + (excused_s if age_s >= passed_s else 0.0)
        is_alive = age_s - excused_s <= max_age_s
        if is_alive != is_serving:
            is_serving = is_alive
            if is_alive:
                _log.info("engine_loop_recovered")
            else:
                _log.error("engine_loop_hangs", age_s=age_s, max_age_s=max_age_s)
            await set_serving(is_alive)
