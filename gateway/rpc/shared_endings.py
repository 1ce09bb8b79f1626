"""Tells the fleet how requests ended with an error here, so that any gateway can be asked why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from common.clock import Clock
from common.errors import UnavailableError
from common.types import Reason
from gateway.rpc.endings import Ending, Endings
from gateway.store_health import StoreHealth

_TELL_S = 1.0


class EndingStore(Protocol):
    """The latest notes of the whole fleet. Raises UnavailableError(STORE_UNAVAILABLE)."""

    async def note(self, notes: Mapping[str, str]) -> None:
        """Keeps notes by request id, each in place of an earlier one; an empty one forgets that."""
        ...

    async def find(self, request_id: str) -> tuple[str, float] | None:
        """A note, and its age in seconds."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


class KnownEnding(NamedTuple):
    """How a request ended with an error, and at which gateway."""

    ending: Ending
    gateway_id: str


class SharedEndings:
    """Writes this gateway's endings into the store, not on the way of a refusal but a little later, many at once."""

    def __init__(
        self, notes: EndingStore, endings: Endings, store: StoreHealth, clock: Clock, *, gateway_id: str
    ) -> None:
        self._notes = notes
        self._endings = endings
        self._store = store
        self._clock = clock
        self._gateway_id = gateway_id

    async def run(self) -> None:
        """Tells what is new from time to time, for ever."""
        while True:
            await asyncio.sleep(_TELL_S)
            await self.tell()

    async def tell(self) -> None:
        """Tells what is new; what the store does not take is told the next time."""
        untold = self._endings.take_untold()
        if not untold:
            return
        notes = {fleet_id: "" if it is None else self._packed(it) for fleet_id, it in untold.items()}
        try:
            await self._notes.note(notes)
        except UnavailableError as error:
            self._store.failed(error)
            self._endings.give_back(untold)

    async def find(self, fleet_id: str) -> KnownEnding | None:
        """How a request ended last, if that was with an error, not long ago, anywhere. Raises UnavailableError."""
        await self.tell()
        here = self._endings.find(fleet_id)
        found = await self._notes.find(fleet_id)
        if found is not None:
            known = self._unpacked(fleet_id, *found)
            if here is None or known.ending.at > here.at:
                return known
        return None if here is None else KnownEnding(here, self._gateway_id)

    async def close(self) -> None:
        """Tells the last ones."""
        await self.tell()
        await self._notes.close()

    def _packed(self, ending: Ending) -> str:
        age_s = self._clock.monotonic() - ending.at
        fields = (self._gateway_id, ending.status, ending.reason.name, ending.message, ending.retry_after_s, age_s)
        return json.dumps(fields)

    def _unpacked(self, fleet_id: str, note: str, age_s: float) -> KnownEnding:
        gateway_id, status, reason, message, retry_after_s, age_when_told_s = json.loads(note)
        tenant_id, _, request_id = fleet_id.partition("/")
        at = self._clock.monotonic() - age_s - age_when_told_s
        return KnownEnding(
            Ending(tenant_id, request_id, status, Reason[reason], message, retry_after_s, at), gateway_id
        )
