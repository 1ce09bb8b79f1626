"""What operators have set for tenants, in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.store.connection import Argument, Link, Trunk, text
from gateway.store.keys import PoolKeys


class RedisTenantStore:
    """The `TenantStore` of one gateway on a Redis server. Made without I/O; belongs to one event loop."""

    def __init__(self, store: str | Trunk, *, pool: str, timeout_s: float = 5.0) -> None:
        """`store`: its URL, or a connection that is shared; `timeout_s`: for connecting, and for each reply."""
        keys = PoolKeys(pool)
        self._keys = [keys.tenants, keys.tenants_version]
        self._link = Link(store, timeout_s=timeout_s)
        self._scripts = {
            name: self._link.script(name, ()) for name in ("tenants_read", "tenants_write", "tenants_restore")
        }

    async def read(self, known_version: int) -> tuple[int, dict[str, str] | None]:
        """The version, and all edits if it is another one than the known. See `TenantStore.read`."""
        version, changed = await self._run("tenants_read", known_version)
        if not changed:
            return version, None
        _, edits = changed
        return version, {text(name): text(edit) for name, edit in zip(edits[::2], edits[1::2], strict=True)}

    async def write(self, tenant_id: str, edit: str | None) -> None:
        """Sets one, or removes it."""
        await self._run("tenants_write", tenant_id, edit or "")

    async def restore(self, version: int, edits: Mapping[str, str]) -> None:
        """Writes all, if the store has lost them. See `TenantStore.restore`."""
        arguments: list[Argument] = [version]
        for tenant_id, edit in edits.items():
            arguments += [tenant_id, edit]
        await self._run("tenants_restore", *arguments)

    async def close(self) -> None:
        """Ends the connection."""
        await self._link.close()

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._link.send(self._scripts[name], self._keys, arguments)
