"""Keeps the tenants as their file says, while the gateway runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from gateway.tenants import Tenants, TenantsFileError, load_tenants

_log = structlog.get_logger(__name__)

_LOOK_S = 1.0


class TenantsWatch:
    """Reads the file again when it has changed. A file that is wrong changes nothing, and the log says why."""

    def __init__(self, path: Path, tenants: Tenants) -> None:
        self._path = path
        self._tenants = tenants
        self._seen = self._stamp()

    async def run(self) -> None:
        """Looks from time to time, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Takes the file's tenants if it is another one than at the last look."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            tenants = load_tenants(self._path)
        except TenantsFileError as error:
            _log.error("tenants_file_refused", error=str(error))
            return
        self._tenants.replace(tenants)
        _log.info("tenants_loaded", num_tenants=len(tenants))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
