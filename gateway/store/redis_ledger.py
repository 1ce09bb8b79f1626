"""The ledger in Redis: open records in a hash for each gateway, closed ones in a stream of bounded length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from gateway.ledger import UsageRecord
from gateway.store.connection import Argument, Calls, Script, connect
from gateway.store.keys import PoolKeys

_MAX_CONNECTIONS = 4
_TIMEOUT_S = 5.0
_SCRIPTS = ("ledger_open", "ledger_note", "ledger_close", "ledger_reap", "ledger_leave")


class RedisLedger:
    """The `Ledger` of one gateway. A record is taken from the hash and put into the stream in one script."""

    def __init__(self, url: str, *, pool: str, gateway_id: str, max_records: int) -> None:
        """`max_records`: the stream's length, beyond which the oldest records go."""
        keys = PoolKeys(pool)
        self._prefix = keys.prefix
        self._keys = [keys.ledger, keys.ledger_owners, keys.open_records(gateway_id), keys.prefix + "gateways"]
        self._gateway_id = gateway_id
        self._max_records = max_records
        self._client = connect(url, max_connections=_MAX_CONNECTIONS, timeout_s=_TIMEOUT_S)
        self._calls = Calls(max_running=_MAX_CONNECTIONS, timeout_s=_TIMEOUT_S)
        self._scripts = {name: Script(name, ()) for name in _SCRIPTS}

    async def open(self, record: UsageRecord) -> None:
        """Says that a request is accepted. See `Ledger.open`."""
        await self._run("ledger_open", self._gateway_id, record.record_id, _packed(record))

    async def note(self, records: Sequence[UsageRecord]) -> None:
        """Renews open records. See `Ledger.note`."""
        await self._run("ledger_note", *(it for record in records for it in (record.record_id, _packed(record))))

    async def close(self, record: UsageRecord) -> bool:
        """Writes a record for good. See `Ledger.close`."""
        return bool(await self._run("ledger_close", self._max_records, record.record_id, *_flat(record)))

    async def reap(self) -> int:
        """Closes what dead gateways left open. See `Ledger.reap`."""
        return int(await self._run("ledger_reap", self._prefix, self._max_records))

    async def leave(self) -> None:
        """Forgets this gateway unless it has open records, and closes connections. See `Ledger.leave`."""
        await self._calls.close()
        try:
            await self._run("ledger_leave", self._gateway_id)
        finally:
            await self._client.aclose()

    async def _run(self, name: str, *arguments: Argument) -> Any:
        call = self._calls.run(self._scripts[name], self._client, self._keys, arguments)
        return await asyncio.shield(self._calls.start(call))


def _flat(record: UsageRecord) -> list[Argument]:
    """Name, value, name, value, and so on, as a stream's entry has them."""
    return [part for field in fields(record) for part in (field.name, str(getattr(record, field.name)))]


def _packed(record: UsageRecord) -> str:
    """The same for a hash. Outcome and reason are not known yet: whoever closes it adds them."""
    return json.dumps(_flat(record)[:-4])
