"""The port of the journal: requests and emitted tokens of resumable streams, for whichever gateway goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from common.types import FinishReason, PositionLogprobs


@dataclass(slots=True)
class Passage:
    """A piece of an answer: tokens in order, and why it ended there if it did."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)  # one for each token, or none at all
    finish_reason: FinishReason | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.token_ids and self.finish_reason is None

    def add(
        self, token_ids: tuple[int, ...], logprobs: tuple[PositionLogprobs, ...], finish_reason: FinishReason | None
    ) -> None:
        """Goes on behind what is there."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.finish_reason = finish_reason or self.finish_reason


class Pen:
    """What a live request has still to write into its journal. A passage whose fate is unknown is written again."""

    def __init__(self, writer: int) -> None:
        """`writer`: number of the journal's writer."""
        self.writer = writer
        self._num_written = 0
        self._doubtful = Passage()  # the store may have it or not
        self._turn = asyncio.Lock()
        self.unwritten = Passage()

    async def write(self, journal: Journal, request_id: str) -> bool:
        """Writes all there is. False if another writer has taken over. Raises UnavailableError; may be repeated."""
        async with self._turn:
            while True:
                if self._doubtful.is_empty:
                    self._doubtful, self.unwritten = self.unwritten, Passage()
                if self._doubtful.is_empty:
                    return True
                number = self._num_written + 1
                if not await journal.append(request_id, self.writer, number, self._doubtful):
                    return False
                self._num_written, self._doubtful = number, Passage()

    async def is_mine(self, journal: Journal, request_id: str) -> bool:
        """Whether no other writer has taken over, and the journal is there. Raises UnavailableError."""
        return await journal.writer_of(request_id) == self.writer

    async def forget(self, journal: Journal, request_id: str) -> None:
        """Removes the journal, unless another writer has taken over. Raises UnavailableError."""
        await journal.forget(request_id, self.writer)


@dataclass(frozen=True, slots=True)
class Adopted:
    """A journal in the hands of a new writer; what the former one still writes is refused."""

    writer: int  # number of the new writer
    request: str  # as created
    digest: str  # as created
    answer: Passage


class Journal(Protocol):
    """One journal for each request id, kept for a while after its last change.

    All methods raise UnavailableError(STORE_UNAVAILABLE) when the store cannot be reached.
    """

    async def create(self, request_id: str, *, request: str, digest: str) -> int | None:
        """Begins a journal and returns the number of its writer; None, and no change, if there is one."""
        ...

    async def adopt(self, request_id: str) -> Adopted | None:
        """Takes a journal over, as its only writer from now on; None if there is none."""
        ...

    async def writer_of(self, request_id: str) -> int | None:
        """The number of a journal's writer; None if there is no journal."""
        ...

    async def append(self, request_id: str, writer: int, number: int, passage: Passage) -> bool:
        """Writes the writer's passage of that number, from 1; nothing if it is written already.

        False, and no change, if another writer has taken over or the journal is forgotten.
        """
        ...

    async def forget(self, request_id: str, writer: int) -> None:
        """Removes a journal, unless another writer has taken over."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...
