"""How requests ended with an error, in Redis, for whichever gateway is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.store.connection import Argument, Link, Trunk, text
from gateway.store.keys import PoolKeys

_MAX_KEPT = 10_000


class RedisEndingStore:
    """The `EndingStore` of one gateway on a Redis server. Made without I/O; belongs to one event loop."""

    def __init__(self, store: str | Trunk, *, pool: str, timeout_s: float = 5.0) -> None:
        """`store`: its URL, or a connection that is shared; `timeout_s`: for connecting, and for each reply."""
        keys = PoolKeys(pool)
        self._keys = [keys.endings, keys.ending_times]
        self._link = Link(store, timeout_s=timeout_s)
        self._scripts = {name: self._link.script(name, ("clock",)) for name in ("ending_note", "ending_find")}

    async def note(self, notes: Mapping[str, str]) -> None:
        """Keeps notes by request id. See `EndingStore.note`."""
        arguments: list[Argument] = [_MAX_KEPT]
        for request_id, note in notes.items():
            arguments += [request_id, note]
        await self._run("ending_note", *arguments)

    async def find(self, request_id: str) -> tuple[str, float] | None:
        """A note, and its age in seconds."""
        found = await self._run("ending_find", request_id)
        return None if found is None else (text(found[0]), found[1] / 1e6)

    async def close(self) -> None:
        """Ends the connection."""
        await self._link.close()

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._link.send(self._scripts[name], self._keys, arguments)
