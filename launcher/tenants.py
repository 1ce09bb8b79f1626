"""The tenants of a deployment on this machine: given ones, or three to try it with, one of each band."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalTenant:
    """A tenant and the key that names it."""

    tenant_id: str
    band: str  # "high", "normal" or "low"
    api_key: str
    terms: Mapping[str, object] = field(default_factory=dict, compare=False)  # weight and limits of a tenants file


def make_tenants() -> tuple[LocalTenant, ...]:
    """One tenant of each band, the one served first in front, with keys made anew."""
    names = (("paying", "high"), ("regular", "normal"), ("batch", "low"))
    return tuple(LocalTenant(tenant_id, band, secrets.token_urlsafe(18)) for tenant_id, band in names)


def write_tenants_file(tenants: Iterable[LocalTenant], path: Path) -> None:
    """Writes what a gateway reads: hashes of the keys, readable by this user only."""
    entries = [
        {
            "id": tenant.tenant_id,
            "key_sha256": hashlib.sha256(tenant.api_key.encode()).hexdigest(),
            "band": tenant.band,
            **tenant.terms,
        }
        for tenant in tenants
    ]
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"tenants": entries}, file, indent=2)
