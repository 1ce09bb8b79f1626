"""What a session still has to send: merged while its gateway reads slowly, so bounded by what its requests say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from protos.inference.v1 import types_pb2, worker_pb2

MAX_POSITIONS = 4096
"""Tokens in one message at most; with 20 log probabilities each, that stays below 2 MiB."""

MAX_REQUESTS = 1024
"""Requests with news kept for a gateway that submits without reading; its commands wait beyond that."""


class Mailbox:
    """One writer takes, everything else puts; all on one event loop."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, int], worker_pb2.RequestOutput] = {}
        self._usage: worker_pb2.BlockUsage | None = None
        self._ends: deque[worker_pb2.SessionEvent] = deque()  # rejected and handed back; sent after all tokens
        self._goodbye: worker_pb2.Goodbye | None = None
        self._is_news = asyncio.Event()
        self._is_room = asyncio.Event()
        self._is_room.set()

    def __repr__(self) -> str:
        return f"Mailbox(outputs={len(self._outputs)}, ends={len(self._ends)}, goodbye={self._goodbye})"

    def put_outputs(self, outputs: Iterable[worker_pb2.RequestOutput]) -> None:
        """Adds tokens; those of a request that still waits here are appended to it. Takes ownership."""
        for output in outputs:
            key = (output.request_id, output.attempt)
            waiting = self._outputs.get(key)
            if waiting is None:
                self._outputs[key] = output
            else:
                # Lists are appended; a set scalar wins: the finish reason of the last, the cached tokens of the first.
                waiting.MergeFrom(output)
        self._update_events()

    def put_usage(self, usage: worker_pb2.BlockUsage) -> None:
        """Replaces older numbers; claims that these accounted for stay accounted for. Takes ownership."""
        if self._usage is not None:
            usage.accounted.extend(self._usage.accounted)
        self._usage = usage
        self._update_events()

    def put_rejected(self, rejected: worker_pb2.Rejected) -> None:
        """Adds an answer to a submit, or the end of a request that failed."""
        self._ends.append(worker_pb2.SessionEvent(rejected=rejected))
        self._update_events()

    def put_handed_back(self, handed_back: worker_pb2.HandedBack) -> None:
        """Adds a request that is to go on elsewhere."""
        self._ends.append(worker_pb2.SessionEvent(handed_back=handed_back))
        self._update_events()

    def put_goodbye(self, reason: types_pb2.Reason.ValueType) -> None:
        """Ends the session once everything else is sent."""
        self._goodbye = worker_pb2.Goodbye(reason=reason)
        self._update_events()

    async def room(self) -> None:
        """Waits while the news of too many requests wait to be read."""
        await self._is_room.wait()

    async def take(self) -> worker_pb2.SessionEvent:
        """The next event; waits for news. After a goodbye nothing more is to be taken."""
        await self._is_news.wait()
        event = self._next()
        self._update_events()
        return event

    def _update_events(self) -> None:
        is_news = self._outputs or self._usage is not None or self._ends or self._goodbye is not None
        (self._is_news.set if is_news else self._is_news.clear)()
        is_room = len(self._outputs) + len(self._ends) < MAX_REQUESTS
        (self._is_room.set if is_room else self._is_room.clear)()

    def _next(self) -> worker_pb2.SessionEvent:
        if self._outputs or self._usage is not None:
            step = worker_pb2.Step(usage=self._usage)
            self._usage = None
            self._take_outputs(step)
            return worker_pb2.SessionEvent(step=step)
        if self._ends:
            return self._ends.popleft()
        event = worker_pb2.SessionEvent(goodbye=self._goodbye)
        self._goodbye = None
        return event

    def _take_outputs(self, step: worker_pb2.Step) -> None:
        room = MAX_POSITIONS
        while self._outputs and room > 0:
            key = next(iter(self._outputs))
            output = self._outputs.pop(key)
            if len(output.token_ids) > room:
                step.outputs.append(_split_head(output, room))
                self._outputs = {key: output, **self._outputs}
                return
            room -= max(1, len(output.token_ids))
            step.outputs.append(output)


def _split_head(output: worker_pb2.RequestOutput, count: int) -> worker_pb2.RequestOutput:
    """Removes the first `count` tokens from `output` and returns them; the finish reason stays with the rest."""
    head = worker_pb2.RequestOutput(
        request_id=output.request_id,
        attempt=output.attempt,
        token_ids=output.token_ids[:count],
        logprobs=output.logprobs[:count],
        cached_prompt_tokens=output.cached_prompt_tokens,
    )
    output.cached_prompt_tokens = 0
    del output.token_ids[:count]
    del output.logprobs[:count]
    return head
