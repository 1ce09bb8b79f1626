from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common.errors import UnauthenticatedError
from gateway.tenants import hash_key, load_tenants
from gateway.tenants_watch import TenantsWatch


def write(path: Path, *keys: str, **fields: object) -> None:
    entries = [{"id": "acme", "key_sha256": hash_key(key), "band": "high", **fields} for key in keys]
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tenants": entries}))
    os.replace(new, path)


def test_a_changed_file_is_effective_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    write(path, "k1")
    tenants = load_tenants(path)
    watch = TenantsWatch(path, tenants)
    write(path, "k2", limits={"requests_per_minute": 3})
    with pytest.raises(UnauthenticatedError):
        tenants.authenticate("k2")
    watch.look()
    assert tenants.authenticate("k2").limits.requests_per_minute == 3
    with pytest.raises(UnauthenticatedError):
        tenants.authenticate("k1")


@pytest.mark.parametrize("content", [None, "{", '{"tenants": [{"id": "acme"}]}'])
def test_a_wrong_file_changes_nothing_until_it_is_right_again(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tenants.json"
    write(path, "k1")
    tenants = load_tenants(path)
    watch = TenantsWatch(path, tenants)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    watch.look()
    watch.look()
    assert tenants.authenticate("k1").tenant_id == "acme"
    write(path, "k2", "k3")
    watch.look()
    assert tenants.authenticate("k3").tenant_id == "acme"
