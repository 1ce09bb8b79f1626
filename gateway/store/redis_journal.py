"""The journal in Redis: for each request a hash with what was asked and who writes, and a stream of passages."""

from __future__ import annotations

import json
from typing import Any

from common.types import FinishReason, PositionLogprobs, TokenLogprob
from gateway.journal import Adopted, Passage
from gateway.store.connection import Argument, Link, Trunk, text
from gateway.store.keys import PoolKeys

_TIMEOUT_S = 2.0
_SCRIPTS = ("journal_create", "journal_adopt", "journal_append", "journal_forget", "journal_writer")


class RedisJournal:
    """The `Journal` of a pool. Made without I/O; belongs to one event loop."""

    def __init__(self, store: str | Trunk, *, pool: str, ttl_s: float, timeout_s: float = _TIMEOUT_S) -> None:
        """`ttl_s`: how long a journal is kept after its last change."""
        self._keys = PoolKeys(pool)
        self._ttl_ms = round(ttl_s * 1000)
        self._link = Link(store, timeout_s=timeout_s)
        self._scripts = {name: self._link.script(name, ()) for name in _SCRIPTS}

    async def create(self, request_id: str, *, request: str, digest: str) -> int | None:
        """Begins a journal. See `Journal.create`."""
        return int(await self._run("journal_create", request_id, request, digest)) or None

    async def adopt(self, request_id: str) -> Adopted | None:
        """Takes a journal over. See `Journal.adopt`."""
        reply = await self._run("journal_adopt", request_id)
        if reply is None:
            return None
        writer, request, digest, passages = reply
        answer = Passage()
        for passage in passages:
            _unpack_into(answer, json.loads(passage))
        return Adopted(int(writer), text(request), text(digest), answer)

    async def writer_of(self, request_id: str) -> int | None:
        """The number of a journal's writer. See `Journal.writer_of`."""
        writer = await self._run("journal_writer", request_id)
        return None if writer is None else int(writer)

    async def append(self, request_id: str, writer: int, number: int, passage: Passage) -> bool:
        """Writes what follows. See `Journal.append`."""
        return bool(await self._run("journal_append", request_id, writer, number, _packed(passage)))

    async def forget(self, request_id: str, writer: int) -> None:
        """Removes a journal. See `Journal.forget`."""
        await self._run("journal_forget", request_id, writer)

    async def close(self) -> None:
        """Closes connections once the calls under way have ended."""
        await self._link.close()

    async def _run(self, name: str, request_id: str, *arguments: Argument) -> Any:
        keys = [self._keys.journal(request_id), self._keys.passages(request_id)]
        return await self._link.send(self._scripts[name], keys, (self._ttl_ms, *arguments))


def _packed(passage: Passage) -> str:
    fields: dict[str, Any] = {"t": passage.token_ids}
    if passage.logprobs:
        fields["l"] = [[_pair(it.sampled), [_pair(top) for top in it.top]] for it in passage.logprobs]
    if passage.finish_reason is not None:
        fields["f"] = int(passage.finish_reason)
    return json.dumps(fields, separators=(",", ":"))


def _pair(token: TokenLogprob) -> list[float]:
    return [token.token_id, token.logprob]


def _unpack_into(answer: Passage, fields: dict[str, Any]) -> None:
    logprobs = tuple(
        PositionLogprobs(TokenLogprob(*sampled), tuple(TokenLogprob(*it) for it in top))
        for sampled, top in fields.get("l", ())
    )
    answer.add(tuple(fields["t"]), logprobs, FinishReason(fields["f"]) if "f" in fields else None)
