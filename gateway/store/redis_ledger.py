"""The ledger in Redis: open records in a hash for each gateway, closed ones in a stream of bounded length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any

from common.errors import UnavailableError
from gateway.ledger import UsageRecord
from gateway.store.connection import Argument, Link, Trunk
from gateway.store.keys import PoolKeys

_TIMEOUT_S = 2.0
_MAX_TOGETHER = 100
_NAMES = tuple(field.name for field in fields(UsageRecord))
_values = attrgetter(*_NAMES)
_SCRIPTS = ("ledger_open", "ledger_note", "ledger_close", "ledger_leave")


class _Together:
    """Writes records that come while a write is under way together in the next one."""

    def __init__(self, write: Callable[[Sequence[UsageRecord]], Awaitable[Sequence[object]]]) -> None:
        """`write` gives one result for each record."""
        self._write = write
        self._waiting: list[tuple[UsageRecord, asyncio.Future[object]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, record: UsageRecord) -> object:
        """The record's result. Raises UnavailableError."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((record, future))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await future

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_TOGETHER], self._waiting[_MAX_TOGETHER:]
            results: Sequence[object] = ()
            failure: UnavailableError | None = None
            try:
                results = await self._write([record for record, _ in batch])
            except UnavailableError as error:
                failure = error
            for index, (_, future) in enumerate(batch):
                if future.done():  # its caller has been cancelled
                    continue
                if failure is not None:
                    future.set_exception(failure)
                else:
                    future.set_result(results[index])
        self._writing = None


class RedisLedger:
    """The `Ledger` of one gateway. A record is taken from the hash and put into the stream in one script."""

    def __init__(
        self, store: str | Trunk, *, pool: str, gateway_id: str, max_records: int, timeout_s: float = _TIMEOUT_S
    ) -> None:
        """`max_records`: the stream's length, beyond which the oldest records go."""
        keys = PoolKeys(pool)
        self._prefix = keys.prefix
        self._keys = [
            keys.ledger,
            keys.ledger_owners,
            keys.open_records(gateway_id),
            keys.prefix + "gateways",
            keys.reaped_records(gateway_id),
        ]
        self._gateway_id = gateway_id
        self._max_records = max_records
        self._link = Link(store, timeout_s=timeout_s)
        self._scripts = {name: self._link.script(name, ()) for name in _SCRIPTS}
        self._reaping = self._link.script("ledger_reap", ("clock", "common", "limits"))
        self._reaping_keys = [*keys.pool_keys(), keys.ledger, keys.ledger_owners]
        self._opens = _Together(self._open)
        self._closes = _Together(self._close)

    async def open(self, record: UsageRecord) -> None:
        """Says that a request is accepted. See `Ledger.open`."""
        await self._opens.add(record)

    async def _open(self, records: Sequence[UsageRecord]) -> Sequence[object]:
        pairs = [part for record in records for part in (record.record_id, _packed(record))]
        await self._run("ledger_open", self._gateway_id, *pairs)
        return records

    async def note(self, records: Sequence[UsageRecord]) -> None:
        """Renews open records. See `Ledger.note`."""
        await self._run("ledger_note", *(it for record in records for it in (record.record_id, _packed(record))))

    async def close(self, record: UsageRecord) -> bool:
        """Writes a record for good. See `Ledger.close`."""
        return bool(await self._closes.add(record))

    async def _close(self, records: Sequence[UsageRecord]) -> Sequence[object]:
        parts = [part for record in records for part in _flat(record)]
        closed: list[int] = await self._run("ledger_close", self._max_records, len(parts) // len(records), *parts)
        return closed

    async def reap(self) -> int:
        """Closes what dead gateways left open. See `Ledger.reap`."""
        arguments = (self._prefix, self._max_records)
        return int(await self._link.send(self._reaping, self._reaping_keys, arguments))

    async def leave(self) -> None:
        """Forgets this gateway unless it has open records, and closes connections. See `Ledger.leave`."""
        try:
            await self._run("ledger_leave", self._gateway_id)
        finally:
            await self._link.close()

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._link.send(self._scripts[name], self._keys, arguments)


def _flat(record: UsageRecord) -> list[Argument]:
    """Name, value, name, value, and so on, as a stream's entry has them."""
    return list(chain.from_iterable(zip(_NAMES, map(str, _values(record)), strict=True)))


def _packed(record: UsageRecord) -> str:
    """The same for a hash. Outcome and reason are not known yet: whoever closes it adds them."""
    return json.dumps(_flat(record)[:-4])
