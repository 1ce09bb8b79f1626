"""The client's view of a request: tokens in, events out, up to its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import FinishReason, PositionLogprobs, Usage
from gateway.lifecycle import Outcome, finished
from gateway.live import LiveRequest, ReadyRequest
from gateway.mailbox import Delivery
from gateway.text.detokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in the queue."""

    request: ReadyRequest


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, with what belongs to its tokens if that was asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The normal end."""

    reason: FinishReason
    usage: Usage
    queue_s: float
    ttft_s: float
    total_s: float


Event = Accepted | TextDelta | Finished


class Answer:
    """Turns what the worker delivers into text. The same for a streamed and a whole answer."""

    def __init__(self, live: LiveRequest) -> None:
        request = live.request
        self._live = live
        self._text = TextStream(request.model.text, request.stop, request.sampling.stop_token_ids)
        self.num_completion_tokens = 0

    def take(self, delivery: Delivery) -> tuple[TextDelta | None, Outcome | None]:
        """What is to be sent now, if anything, and the outcome if this was the end."""
        pushed = self._text.push(delivery.token_ids)
        self.num_completion_tokens += pushed.num_tokens
        text, outcome = pushed.text, None
        if pushed.stopped:
            outcome = finished(FinishReason.STOP)
        elif delivery.finish_reason is not None:
            text += self._text.flush()
            outcome = finished(FinishReason.STOP if self._text.is_stopped else delivery.finish_reason)
        elif delivery.end is not None:
            text += self._text.flush() if delivery.end.finish_reason is not None else ""
            outcome = delivery.end
        request = self._live.request
        token_ids = tuple(delivery.token_ids[: pushed.num_tokens]) if request.return_token_ids else ()
        logprobs = tuple(delivery.logprobs[: pushed.num_tokens])
        delta = TextDelta(text, token_ids, logprobs) if text or token_ids or logprobs else None
        return delta, outcome

    def finish(self, outcome: Outcome, now: float) -> Finished:
        """The last event of a normal end."""
        live = self._live
        if outcome.finish_reason is None:
            raise ValueError(f"not a normal end: {outcome}")
        return Finished(
            reason=outcome.finish_reason,
            usage=live.usage(self.num_completion_tokens),
            queue_s=(now if live.taken_at is None else live.taken_at) - live.accepted_at,
            ttft_s=0.0 if live.first_token_at is None else live.first_token_at - live.arrived,
            total_s=now - live.arrived,
        )
