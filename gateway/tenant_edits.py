"""What operators set for tenants while the gateways run: kept in the store, taken over by every gateway in a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Protocol

import structlog

from common.errors import InvalidRequestError, NotFoundError
from gateway.admission.limits import NO_LIMITS, TenantLimits
from gateway.store_health import StoreHealth
from gateway.tenants import Tenant, TenantEdit, TenantError, Tenants, check_key_hash, check_tenant

_log = structlog.get_logger(__name__)

_LOOK_S = 1.0
_INTEGERS = {field.name for field in fields(TenantLimits)} - {"time_zone", "max_queue_wait_s"}


class TenantStore(Protocol):
    """Edits by tenant id, under a version that grows. Raises UnavailableError(STORE_UNAVAILABLE)."""

    async def read(self, known_version: int) -> tuple[int, dict[str, str] | None]:
        """The version, and all edits if it is another one than the known. A store without any has version 0."""
        ...

    async def write(self, tenant_id: str, edit: str | None) -> None:
        """Sets one, or removes it."""
        ...

    async def restore(self, version: int, edits: Mapping[str, str]) -> None:
        """Writes all, if the store has lost them, which it had under that version."""
        ...

    async def close(self) -> None:
        """Ends the connection."""
        ...


class TenantEdits:
    """Keeps the tenants as operators have set them, and sets them."""

    def __init__(self, edits: TenantStore, tenants: Tenants, store: StoreHealth) -> None:
        self._edits = edits
        self._tenants = tenants
        self._store = store
        self._version = 0
        self._written: dict[str, str] = {}

    async def run(self) -> None:
        """Looks from time to time, for ever."""
        while True:
            with self._store.watched():
                await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Takes over what has changed; what the store has lost it is told again."""
        version, written = await self._edits.read(self._version)
        if version == 0 and self._version > 0:
            await self._edits.restore(self._version, self._written)
            return
        if written is not None:
            self._tenants.edit({tenant_id: _decode(text) for tenant_id, text in written.items()})
            self._version, self._written = version, written
            _log.info("tenant_edits_loaded", version=version, num_edits=len(written))

    async def set(
        self, tenant_id: str, band: str, weight: int, limits: Mapping[str, str], key_hashes: list[str], by: str
    ) -> Tenant:
        """Changes or adds a tenant; what is empty stays as it is, an empty limit goes. Raises InvalidRequestError."""
        await self.look()
        former = self._tenants.find(tenant_id)
        edit = self._edited(former, tenant_id, band, weight, limits, key_hashes)
        await self._write(tenant_id, _encode(edit))
        assert edit.tenant is not None
        _log.info(
            "tenant_set",
            tenant=tenant_id,
            former=_shown(former),
            now=_shown(edit.tenant),
            by=by,
            new_keys=[it[:8] for it in key_hashes],
        )
        return edit.tenant

    def _edited(
        self, former: Tenant | None, tenant_id: str, band: str, weight: int, limits: Mapping[str, str], keys: list[str]
    ) -> TenantEdit:
        if former is None and not (band and keys):
            raise InvalidRequestError.of_field("tenant_id", "is new: a band and a key are needed")
        known_limits = _set(former.limits if former is not None else NO_LIMITS)
        try:
            for name, value in limits.items():
                known_limits.pop(name, None)
                if value:
                    known_limits[name] = _parsed(name, value)
            tenant = check_tenant(
                tenant_id,
                band or (former.band.name.lower() if former is not None else ""),
                weight or (former.weight if former is not None else 1),
                known_limits,
            )
            key_hashes = frozenset(check_key_hash(key_hash) for key_hash in keys) or self._own_keys(tenant_id)
        except TenantError as error:
            raise InvalidRequestError.of_field("tenant", str(error)) from error
        if any(self._tenants.owner_of(it) not in (None, tenant_id) for it in key_hashes or ()):
            raise InvalidRequestError.of_field("key_sha256", "is the key of another tenant")
        return TenantEdit(tenant, key_hashes)

    def _own_keys(self, tenant_id: str) -> frozenset[str] | None:
        """The keys that an earlier edit has set."""
        text = self._written.get(tenant_id)
        return None if text is None else _decode(text).key_hashes

    async def delete(self, tenant_id: str, by: str) -> None:
        """Shuts a tenant out. Raises NotFoundError."""
        await self.look()
        former = self._tenants.find(tenant_id)
        if former is None:
            raise NotFoundError(f"tenant_id: there is no tenant {tenant_id!r}")
        await self._write(tenant_id, _encode(TenantEdit(None)))
        _log.info("tenant_deleted", tenant=tenant_id, former=_shown(former), by=by)

    async def reset(self, tenant_id: str, by: str) -> None:
        """Forgets what was set. Raises NotFoundError."""
        await self.look()
        if not self._tenants.is_edited(tenant_id):
            raise NotFoundError(f"tenant_id: {tenant_id!r} is as the tenants file says")
        former = self._tenants.find(tenant_id)
        await self._write(tenant_id, None)
        _log.info(
            "tenant_reset", tenant=tenant_id, former=_shown(former), now=_shown(self._tenants.find(tenant_id)), by=by
        )

    async def _write(self, tenant_id: str, edit: str | None) -> None:
        await self._edits.write(tenant_id, edit)
        await self.look()

    async def close(self) -> None:
        """Ends the connection."""
        await self._edits.close()


def _set(limits: TenantLimits) -> dict[str, Any]:
    return {name: value for name, value in asdict(limits).items() if value is not None}


def _parsed(name: str, value: str) -> int | float | str:
    """A limit as text; what is no number stays text, which the check of limits then refuses by name."""
    try:
        return int(value) if name in _INTEGERS else float(value) if name == "max_queue_wait_s" else value
    except ValueError:
        return value


def _encode(edit: TenantEdit) -> str:
    tenant = edit.tenant
    if tenant is None:
        return json.dumps({"deleted": True})
    keys = None if edit.key_hashes is None else sorted(edit.key_hashes)
    return json.dumps({"id": tenant.tenant_id, **_described(tenant), "key_sha256": keys})


def _decode(text: str) -> TenantEdit:
    entry = json.loads(text)
    if entry.get("deleted"):
        return TenantEdit(None)
    tenant = check_tenant(entry["id"], entry["band"], entry["weight"], entry["limits"])
    keys = entry["key_sha256"]
    return TenantEdit(tenant, None if keys is None else frozenset(keys))


def _described(tenant: Tenant) -> dict[str, Any]:
    return {"band": tenant.band.name.lower(), "weight": tenant.weight, "limits": _set(tenant.limits)}


def _shown(tenant: Tenant | None) -> dict[str, Any] | None:
    return None if tenant is None else _described(tenant)
