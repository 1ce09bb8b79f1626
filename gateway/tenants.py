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


class TenantError(ValueError):
    """No tenant can be like that; the message says why."""


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


@dataclass(frozen=True, slots=True)
class TenantEdit:
    """What an operator has set for a tenant, in place of what the file says; nothing shuts it out."""

    tenant: Tenant | None
    key_hashes: frozenset[str] | None = None  # None: as in the file


class Tenants:
    """All tenants, found by key: those of the file, under what operators have set."""

    def __init__(self, by_key_hash: Mapping[str, Tenant]) -> None:
        self._of_file = dict(by_key_hash)
        self._edits: dict[str, TenantEdit] = {}
        self._by_key_hash = self._of_file

    def __len__(self) -> int:
        return len(set(self._by_key_hash.values()))

    @property
    def all(self) -> list[Tenant]:
        """Every tenant once, by id."""
        return sorted(set(self._by_key_hash.values()), key=lambda tenant: tenant.tenant_id)

    def find(self, tenant_id: str) -> Tenant | None:
        """The tenant of that id."""
        return next((it for it in self._by_key_hash.values() if it.tenant_id == tenant_id), None)

    def owner_of(self, key_hash: str) -> str | None:
        """Id of the tenant that has that key."""
        tenant = self._by_key_hash.get(key_hash)
        return None if tenant is None else tenant.tenant_id

    def is_edited(self, tenant_id: str) -> bool:
        """Whether an operator has set or deleted it."""
        return tenant_id in self._edits

    def replace(self, others: Tenants) -> None:
        """The file says something else now; calls that are authenticated already go on as they are."""
        self._of_file = others._of_file
        self._merge()

    def edit(self, edits: Mapping[str, TenantEdit]) -> None:
        """These are all that operators have set, by tenant id."""
        self._edits = dict(edits)
        self._merge()

    def _merge(self) -> None:
        merged = {key: tenant for key, tenant in self._of_file.items() if tenant.tenant_id not in self._edits}
        for tenant_id, edit in self._edits.items():
            if edit.tenant is not None:
                of_file = [key for key, tenant in self._of_file.items() if tenant.tenant_id == tenant_id]
                merged.update(dict.fromkeys(of_file if edit.key_hashes is None else edit.key_hashes, edit.tenant))
        self._by_key_hash = merged

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
        where = f"entry {number} ({entry['id']})"
        try:
            key_hash = check_key_hash(entry["key_sha256"])
            tenant = check_tenant(entry["id"], entry["band"], entry.get("weight", 1), entry.get("limits", {}))
        except TenantError as error:
            raise TenantsFileError(f"{where}: {error}") from None
        if key_hash in by_key_hash:
            raise TenantsFileError(f"{where}: another entry has the same key")
        if known.setdefault(tenant.tenant_id, tenant) != tenant:
            raise TenantsFileError(f"{where}: its entries name different bands, weights or limits")
        by_key_hash[key_hash] = tenant
    return by_key_hash


def check_tenant(tenant_id: object, band: object, weight: object, limits: object) -> Tenant:
    """A tenant of values from outside. Raises TenantError for the first that is not allowed."""
    if not isinstance(tenant_id, str) or not _TENANT_ID.fullmatch(tenant_id):
        raise TenantError(f"id must match {_TENANT_ID.pattern}")
    if band not in ("high", "normal", "low"):
        raise TenantError("band must be high, normal or low")
    if type(weight) is not int or not 1 <= weight <= _MAX_WEIGHT:
        raise TenantError(f"weight must be an integer from 1 to {_MAX_WEIGHT}")
    try:
        checked = _LIMITS.validate_python(limits)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, it['loc']))}: {it['msg']}" for it in error.errors())
        raise TenantError(f"limits: {faults}") from None
    return Tenant(tenant_id, Band[str(band).upper()], weight, checked)


def check_key_hash(key_hash: object) -> str:
    """The hash of a key from outside. Raises TenantError."""
    if not isinstance(key_hash, str) or not _KEY_HASH.fullmatch(key_hash):
        raise TenantError("key_sha256 must be 64 hexadecimal digits")
    return key_hash
