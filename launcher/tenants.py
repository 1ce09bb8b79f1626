"""Three tenants to try a deployment with, one of each band, with keys made anew for every start."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """A tenant and the key that names it."""

    tenant_id: str
    band: str  # "high", "normal" or "low"
    api_key: str


def make_tenants() -> tuple[DemoTenant, ...]:
    """One tenant of each band, the one served first in front."""
    names = (("paying", "high"), ("regular", "normal"), ("batch", "low"))
    return tuple(DemoTenant(tenant_id, band, secrets.token_urlsafe(18)) for tenant_id, band in names)


def write_tenants_file(tenants: tuple[DemoTenant, ...], path: Path) -> None:
    """Writes what a gateway reads: hashes of the keys, readable by this user only."""
    entries = [
        {
            "id": tenant.tenant_id,
            "key_sha256": hashlib.sha256(tenant.api_key.encode()).hexdigest(),
            "band": tenant.band,
        }
        for tenant in tenants
    ]
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"tenants": entries}, file, indent=2)
