"""Who may call: tenants by the SHA-256 of their API key, read once from a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import UnauthenticatedError
from common.types import Band, Reason

_TENANT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_KEY_HASH = re.compile(r"[0-9a-f]{64}")


class TenantsFileError(ValueError):
    """The tenants file cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer."""

    tenant_id: str
    band: Band

    @property
    def cache_salt(self) -> str:
        """Separates this tenant's cached prefixes from everybody else's; never the client's choice."""
        return hashlib.sha256(f"tidegate.cache_salt:{self.tenant_id}".encode()).hexdigest()[:32]


def hash_key(key: str) -> str:
    """SHA-256 of an API key, in hex. Keys are long random strings, so a slow hash would add nothing."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tenants:
    """All tenants, found by key."""

    def __init__(self, by_key_hash: Mapping[str, Tenant]) -> None:
        self._by_key_hash = dict(by_key_hash)

    def __len__(self) -> int:
        return len(set(self._by_key_hash.values()))

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

    A tenant with several keys has several entries, all of one band. Raises TenantsFileError.
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
    band_of: dict[str, Band] = {}
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict) or set(entry) != {"id", "key_sha256", "band"}:
            raise TenantsFileError(f"entry {number}: must have exactly id, key_sha256 and band")
        tenant_id, key_hash, band = (entry[name] for name in ("id", "key_sha256", "band"))
        if not isinstance(tenant_id, str) or not _TENANT_ID.fullmatch(tenant_id):
            raise TenantsFileError(f"entry {number}: id must match {_TENANT_ID.pattern}")
        if not isinstance(key_hash, str) or not _KEY_HASH.fullmatch(key_hash):
            raise TenantsFileError(f"entry {number} ({tenant_id}): key_sha256 must be 64 hexadecimal digits")
        if band not in ("high", "normal", "low"):
            raise TenantsFileError(f"entry {number} ({tenant_id}): band must be high, normal or low")
        if key_hash in by_key_hash:
            raise TenantsFileError(f"entry {number} ({tenant_id}): another entry has the same key")
        tenant = Tenant(tenant_id, Band[band.upper()])
        if band_of.setdefault(tenant_id, tenant.band) is not tenant.band:
            raise TenantsFileError(f"entry {number} ({tenant_id}): its entries name different bands")
        by_key_hash[key_hash] = tenant
    return by_key_hash
