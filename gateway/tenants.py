"""Who may call: tenants by the SHA-256 of their API key, read from a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from common.errors import UnauthenticatedError
from common.types import Band, Reason
from gateway.admission.limits import NO_LIMITS, TenantLimits

_TENANT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_REQUIRED = {"id", "key_sha256", "band"}
_MAX_WEIGHT = 1000
_LIMITS = TypeAdapter(TenantLimits)
_KEY_HASH = re.compile(r"[0-9a-f]{64}")


class TenantsFileError(ValueError):
    """The tenants file cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer."""

    tenant_id: str
    band: Band  # the highest that its requests may have
    weight: int = 1  # its part of a backlogged band is proportional to it
    limits: TenantLimits = NO_LIMITS

    @property
    def cache_salt(self) -> str:
        """Separates this tenant's cached prefixes from everybody else's; never the client's choice."""
        return _cache_salt(self.tenant_id)


@lru_cache(maxsize=4096)
def _cache_salt(tenant_id: str) -> str:
    return hashlib.sha256(f"tidegate.cache_salt:{tenant_id}".encode()).hexdigest()[:32]


def hash_key(key: str) -> str:
    """SHA-256 of an API key, in hex. Keys are long random strings, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tenants:
    """All tenants, found by key."""

    def __init__(self, by_key_hash: Mapping[str, Tenant]) -> None:
        self._by_key_hash = dict(by_key_hash)

    def __len__(self) -> int:
        return len(set(self._by_key_hash.values()))

    @property
    def all(self) -> list[Tenant]:
        """Every tenant once, by id."""
        return sorted(set(self._by_key_hash.values()), key=lambda tenant: tenant.tenant_id)

    def find(self, tenant_id: str) -> Tenant | None:
        """The tenant of that id."""
        return next((it for it in self._by_key_hash.values() if it.tenant_id == tenant_id), None)

    def replace(self, others: Tenants) -> None:
        """Becomes the others; calls that are authenticated already go on as they are."""
        self._by_key_hash = others._by_key_hash

    def authenticate(self, key: str | None) -> Tenant:
        """The tenant of a key. Raises UnauthenticatedError if there is none."""
        if key is None:
            message = "no API key: send metadata 'authorization: Bearer <key>'"
            raise UnauthenticatedError(message, reason=Reason.MISSING_CREDENTIAL)
        tenant = self._by_key_hash.get(hash_key(key))
        if tenant is None:
            raise UnauthenticatedError("the API key is not known")
        return tenant


def load_tenants(path: Path) -> Tenants:
    """Reads a file of the form `{"tenants": [{"id": "acme", "key_sha256": "<hex>", "band": "high"}, ...]}`.

    An entry may have a `weight` (1 to 1000, 1 if absent) and `limits`, an object with fields of `TenantLimits`. A
    tenant with several keys has several entries, equal in all but the key. Raises TenantsFileError.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TenantsFileError(f"{path}: {error}") from error
    entries = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise TenantsFileError(f'{path}: must be an object with a list "tenants"')
    try:
        return Tenants(_parse(entries))
    except TenantsFileError as error:
        raise TenantsFileError(f"{path}: {error}") from None


def _parse(entries: Iterable[object]) -> dict[str, Tenant]:
    by_key_hash: dict[str, Tenant] = {}
    known: dict[str, Tenant] = {}
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or not _REQUIRED <= set(entry) <= _REQUIRED | {"weight", "limits"}:
            raise TenantsFileError(f"entry {number}: must have id, key_sha256 and band, and may have weight and limits")
        tenant_id, key_hash, band = (entry[name] for name in ("id", "key_sha256", "band"))
        if not isinstance(tenant_id, str) or not _TENANT_ID.fullmatch(tenant_id):
            raise TenantsFileError(f"entry {number}: id must match {_TENANT_ID.pattern}")
        if not isinstance(key_hash, str) or not _KEY_HASH.fullmatch(key_hash):
            raise TenantsFileError(f"entry {number} ({tenant_id}): key_sha256 must be 64 hexadecimal digits")
        if band not in ("high", "normal", "low"):
            raise TenantsFileError(f"entry {number} ({tenant_id}): band must be high, normal or low")
        if key_hash in by_key_hash:
            raise TenantsFileError(f"entry {number} ({tenant_id}): another entry has the same key")
        weight = entry.get("weight", 1)
        if type(weight) is not int or not 1 <= weight <= _MAX_WEIGHT:
            raise TenantsFileError(f"entry {number} ({tenant_id}): weight must be an integer from 1 to {_MAX_WEIGHT}")
        try:
            limits = _LIMITS.validate_python(entry.get("limits", {}))
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, it['loc']))}: {it['msg']}" for it in error.errors())
            raise TenantsFileError(f"entry {number} ({tenant_id}): limits: {faults}") from None
        tenant = Tenant(tenant_id, Band[band.upper()], weight, limits)
        if known.setdefault(tenant_id, tenant) != tenant:
            raise TenantsFileError(f"entry {number} ({tenant_id}): its entries name different bands, weights or limits")
        by_key_hash[key_hash] = tenant
    return by_key_hash
