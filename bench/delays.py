"""How long requests and tokens are on their way, from clients that read the times that null workers write."""

from __future__ import annotations

import time
from array import array
from contextlib import aclosing
from dataclasses import dataclass, field

from bench.null_worker import STAMP_CHARS, seconds_since
from bench.raw_client import RawClient


@dataclass(slots=True)
class Delays:
    """Seconds, one for each token or request of a measurement."""

    ttft: array[float] = field(default_factory=lambda: array("d"))  # first token - request; the worker sends it at once
    transit: array[float] = field(default_factory=lambda: array("d"))  # received - sent, of every token
    gap: array[float] = field(default_factory=lambda: array("d"))  # gap between receipts - gap between sends
    num_failed: int = 0


async def stream(client: RawClient, num_tokens: int, delays: Delays, begin: float) -> None:
    """One request; its delays count from `begin` (monotonic seconds) on."""
    sent = time.monotonic()
    last: float | None = None
    is_finished = False
    async with aclosing(client.stream(num_tokens, timeout_s=120)) as texts:
        async for now, text in texts:
            is_finished = not text
            for start in range(0, len(text), STAMP_CHARS):
                transit = seconds_since(int(text[start : start + STAMP_CHARS], 16), now)
                if now >= begin:
                    delays.transit.append(transit)
                    if last is not None:
                        delays.gap.append(transit - last)
                    elif sent >= begin:
                        delays.ttft.append(now - sent)
                last = transit
    delays.num_failed += not is_finished
