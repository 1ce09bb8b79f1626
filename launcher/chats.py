"""One question to a deployment, its answer as it arrives, and how long that took."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from client import Client, Delta, Finished, Message, Sampling
from common.clock import Clock
from common.types import FinishReason, Usage

ANSWER_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Chat:
    """A tenant's question, and what has come of it so far. Times are the clock's, in seconds."""

    title: str
    question: str
    api_key: str
    sampling: Sampling
    text: str = ""
    asked_at: float = 0.0
    token_times: list[float] = field(default_factory=list)  # of deltas
    usage: Usage | None = None
    reason: FinishReason | None = None
    error: str = ""

    @property
    def is_well_ended(self) -> bool:
        """Whether the answer ended as answers do."""
        return self.reason in (FinishReason.STOP, FinishReason.LENGTH) and bool(self.text)

    @property
    def ttft_s(self) -> float | None:
        """First token - scheduled arrival; None if there was none."""
        return self.token_times[0] - self.asked_at if self.token_times else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (output tokens - 1); None with fewer than two."""
        if self.usage is None or self.usage.completion_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.usage.completion_tokens - 1)


async def ask(chat: Chat, address: str, clock: Clock, on_text: Callable[[], None]) -> None:
    """Fills in the chat while the answer streams; `on_text` is called whenever there is more. Raises ClientError."""
    chat.asked_at = clock.monotonic()
    async with Client(address, chat.api_key) as client:
        events = client.chat([Message("user", chat.question)], chat.sampling, timeout_s=ANSWER_TIMEOUT_S)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    chat.token_times.append(clock.monotonic())
                    chat.text += event.text
                    on_text()
                elif isinstance(event, Finished):
                    chat.usage, chat.reason = event.usage, event.reason
                    on_text()
