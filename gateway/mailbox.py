"""The one-slot hand-off to a client's stream: what arrives while the stream is busy is merged, never queued up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.types import FinishReason, PositionLogprobs
from gateway.lifecycle import Outcome

Tap = Callable[[Sequence[int], Sequence[PositionLogprobs]], bool]
"""Takes tokens and their log probabilities at once, or says that it cannot."""


@dataclass(slots=True)
class Delivery:
    """What happened since the last look."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # the worker's last word
    end: Outcome | None = None  # decided elsewhere: cancelled, expired, worker lost for good, drained


class Mailbox:
    """Many writers on one event loop, one reader. Its content is bounded by what a request may generate."""

    def __init__(self) -> None:
        self._delivery: Delivery | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tap: Tap | None = None  # while the reader waits
        self._loop: asyncio.AbstractEventLoop | None = None  # of the reader; asking for it costs a system call

    def __repr__(self) -> str:
        return f"Mailbox({self._delivery})"

    @property
    def num_unread_tokens(self) -> int:
        """Tokens that the reader has not taken yet."""
        return len(self._delivery.token_ids) if self._delivery is not None else 0

    def put_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], finish_reason: FinishReason | None
    ) -> None:
        """Adds tokens behind the unread ones."""
        delivery = self._delivery
        if delivery is None:
            if self._tap is not None and finish_reason is None and self._tap(token_ids, logprobs):
                return
            self._hand_over(Delivery(list(token_ids), list(logprobs), finish_reason))
            return
        delivery.token_ids.extend(token_ids)
        delivery.logprobs.extend(logprobs)
        if finish_reason is not None:
            delivery.finish_reason = finish_reason

    def put_end(self, outcome: Outcome) -> None:
        """Tells the reader to end; the first end stays."""
        if self._delivery is None:
            self._hand_over(Delivery(end=outcome))
        elif self._delivery.end is None:
            self._delivery.end = outcome

    async def take(self, tap: Tap | None = None) -> Delivery:
        """Everything unread, as one delivery; waits for the first. Tokens that come meanwhile, but for the last ones,
        go to the tap if it can take them, and the reader waits on."""
        if self._delivery is None:
            self._loop = self._loop or asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            self._tap = tap
            try:
                await self._waiter
            finally:
                self._waiter = self._tap = None
        delivery, self._delivery = self._delivery, None
        assert delivery is not None, "woken without a delivery"
        return delivery

    def _hand_over(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._tap = None  # the reader is next
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
