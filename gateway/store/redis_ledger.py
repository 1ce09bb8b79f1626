"""The ledger in Redis: open records in a hash for each gateway, closed ones in a stream of bounded length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

from gateway.ledger import UsageRecord
from gateway.store.connection import Argument, Link, Trunk
from gateway.store.keys import PoolKeys

_TIMEOUT_S = 2.0
_to_json = json.JSONEncoder().encode
_SCRIPTS = ("ledger_open", "ledger_note", "ledger_close", "ledger_leave")


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

    def open(self, record: UsageRecord) -> asyncio.Future[Any]:
        """Says that a request is accepted. See `Ledger.open`."""
        reply = self._send("ledger_open", self._gateway_id, record.record_id, _packed(record))
        self._link.flush()
        return reply

    async def note(self, records: Sequence[UsageRecord]) -> None:
        """Renews open records. See `Ledger.note`."""
        await self._send("ledger_note", *(it for record in records for it in (record.record_id, _packed(record))))

    def close(self, record: UsageRecord) -> asyncio.Future[bool]:
        """Writes a record for good. See `Ledger.close`."""
        arguments = (self._max_records, *_flat(record))
        return self._link.send(self._scripts["ledger_close"], self._keys, arguments, read=bool)

    async def reap(self) -> int:
        """Closes what dead gateways left open. See `Ledger.reap`."""
        arguments = (self._prefix, self._max_records, *UsageRecord._fields)
        return int(await self._link.send(self._reaping, self._reaping_keys, arguments))

    async def leave(self) -> None:
        """Forgets this gateway unless it has open records, and closes connections. See `Ledger.leave`."""
        try:
            await self._send("ledger_leave", self._gateway_id)
        finally:
            await self._link.close()

    def _send(self, name: str, *arguments: Argument) -> asyncio.Future[Any]:
        return self._link.send(self._scripts[name], self._keys, arguments)


def _flat(record: UsageRecord) -> list[Argument]:
    """Name, value, name, value, and so on, as a stream's entry has them."""
    return list(chain.from_iterable(zip(UsageRecord._fields, map(str, record), strict=True)))


def _packed(record: UsageRecord) -> str:
    """Its values for a hash. Outcome and reason are not known yet: whoever closes it adds them."""
    return _to_json(list(map(str, record[:-2])))
