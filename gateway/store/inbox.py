"""The reading end of a gateway's inbox: a Redis stream on a connection of its own, each message returned once."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.store.connection import connect, store_errors, text

_BLOCK_S = 1.0  # of one read in the server; no caller waits for its end
_MAX_MESSAGES = 1000


class Inbox:
    """Reads on from the last message it returned, so nothing is lost when a connection or a caller goes.

    The blocking read is a task that outlives a caller that times out or is cancelled: the next one takes its result.
    """

    def __init__(self, url: str, key: str, *, timeout_s: float) -> None:
        self._key = key
        self._client = connect(url, max_connections=1, timeout_s=timeout_s, block_s=_BLOCK_S)
        self._last_id = b"0-0"
        self._reading: asyncio.Task[list[tuple[bytes, dict[str, str]]]] | None = None

    async def read(self, *, timeout_s: float) -> list[dict[str, str]]:
        """The new messages' fields in order, at most a thousand; [] if none came within timeout_s.

        Raises UnavailableError(STORE_UNAVAILABLE). One reader at a time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            if self._reading is None:
                self._reading = loop.create_task(self._read_after(self._last_id))
            done, _ = await asyncio.wait([self._reading], timeout=max(deadline - loop.time(), 0.0))
            if not done:
                return []
            task, self._reading = self._reading, None
            messages = task.result()
            if messages:
                self._last_id = messages[-1][0]
                return [fields for _, fields in messages]
            if loop.time() >= deadline:
                return []

    async def _read_after(self, last_id: bytes) -> list[tuple[bytes, dict[str, str]]]:
        """Trims what was returned before, then reads what follows it."""
        block_ms = round(_BLOCK_S * 1000)
        with store_errors():
            await self._command("XTRIM", self._key, "MINID", _next_id(last_id))
            reply = await self._command(
                "XREAD", "COUNT", _MAX_MESSAGES, "BLOCK", block_ms, "STREAMS", self._key, last_id
            )
        return [(message_id, _decoded(fields)) for _, messages in reply for message_id, fields in messages]

    async def _command(self, *arguments: Any) -> Any:
        return await self._client.execute_command(*arguments)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        """Ends the read under way and the connection."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        await self._client.aclose()


def _decoded(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {text(name): text(value) for name, value in fields.items()}


def _next_id(message_id: bytes) -> str:
    milliseconds, number = text(message_id).split("-")
    return f"{milliseconds}-{int(number) + 1}"
