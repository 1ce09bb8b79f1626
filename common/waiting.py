"""Waiting for one thing, with a bound."""

from __future__ import annotations

import asyncio
from typing import Any


async def done_within(future: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether a future or task is done before so many seconds have passed; if not, it goes on.

    What `asyncio.wait` does for many, at a fraction of its price for one.
    """
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(max(timeout_s, 0.0), wake)
    future.add_done_callback(wake)
    try:
        await waiter
    finally:
        timer.cancel()
        future.remove_done_callback(wake)
    return future.done()
