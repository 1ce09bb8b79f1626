"""The client's view of a request: tokens in, events out, up to its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.errors import TidegateError
from common.types import FinishReason, PositionLogprobs, Usage
from gateway.admission.limits import Remaining
from gateway.lifecycle import Outcome, finished
from gateway.live import LiveRequest, ReadyRequest
from gateway.mailbox import Delivery
from gateway.text.detokenizer import TextStream

# What merged for a slow reader may be as long as the context. With 20 log probabilities each, so many tokens are about
# 1 MiB on the wire, and a message may have 4.
_MAX_DELTA_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in the queue."""

    request: ReadyRequest
    remaining: Remaining  # of the tenant's limits


class TextDelta(NamedTuple):
    """New text, with what belongs to its tokens if that was asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    offset: int  # output tokens up to here


@dataclass(frozen=True, slots=True)
class Finished:
    """The normal end."""

    reason: FinishReason
    usage: Usage
    queue_s: float
    ttft_s: float
    total_s: float


Event = Accepted | TextDelta | Finished


class Outlet(Protocol):
    """The way to a client, for text that needs nobody to wait for it."""

    on_stuck: Callable[[TidegateError], None]  # the client does not read what was sent

    @property
    def is_free(self) -> bool:
        """Whether all that was sent so far is on its way."""

    def send(self, delta: TextDelta) -> None:
        """Sends text while it is free."""


class Answer:
    """Turns what the worker delivers into text. The same for a streamed and a whole answer."""

    def __init__(self, live: LiveRequest, *, offset: int = 0) -> None:
        """`offset`: output tokens that the client has got already."""
        request = live.request
        self._offset = offset
        self._live = live
        self._text = TextStream(request.model.text, request.stop, request.sampling.stop_token_ids)
        self.num_completion_tokens = 0

    def pour(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], outlet: Outlet) -> bool:
        """Sends the text of tokens right away. False if they are for `take`: the outlet is not free, the client knows
        some of them, or they are too many for one delta."""
        if not outlet.is_free or self.num_completion_tokens < self._offset or len(token_ids) > _MAX_DELTA_TOKENS:
            return False
        delta = self._push(token_ids, logprobs)
        self._live.num_delivered_tokens = self.num_completion_tokens
        if delta.text or delta.token_ids or delta.logprobs:
            outlet.send(delta)
        return True

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._text.is_stopped

    def take(self, delivery: Delivery) -> tuple[list[TextDelta], Outcome | None]:
        """What is to be sent now, and the outcome if this was the end."""
        token_ids, logprobs = delivery.token_ids, delivery.logprobs
        num_known = self._offset - self.num_completion_tokens
        if num_known > 0:
            self._push(token_ids[:num_known], [])
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        deltas = []
        for start in range(0, len(token_ids), _MAX_DELTA_TOKENS):
            deltas.append(self._push(token_ids[start : start + _MAX_DELTA_TOKENS], logprobs[start:]))
        outcome: Outcome | None = None
        if self._text.is_stopped:
            outcome = finished(FinishReason.STOP)
        elif delivery.finish_reason is not None:
            deltas.append(self._flush())
            outcome = finished(FinishReason.STOP if self._text.is_stopped else delivery.finish_reason)
        elif delivery.end is not None:
            if delivery.end.finish_reason is not None:
                deltas.append(self._flush())
            outcome = delivery.end
        self._live.num_delivered_tokens = self.num_completion_tokens
        return [delta for delta in deltas if delta.text or delta.token_ids or delta.logprobs], outcome

    def _push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> TextDelta:
        pushed = self._text.push(token_ids)
        self.num_completion_tokens += pushed.num_tokens
        are_ids_wanted = self._live.request.return_token_ids
        return TextDelta(
            text=pushed.text,
            token_ids=tuple(token_ids[: pushed.num_tokens]) if are_ids_wanted else (),
            logprobs=tuple(logprobs[: pushed.num_tokens]) if logprobs else (),
            offset=self.num_completion_tokens,
        )

    def _flush(self) -> TextDelta:
        return TextDelta(self._text.flush(), (), (), self.num_completion_tokens)

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
