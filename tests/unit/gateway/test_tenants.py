from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UnauthenticatedError
from common.types import Band, Reason
from gateway.tenants import Tenant, TenantsFileError, hash_key, load_tenants


def entry(**changes: Any) -> dict[str, Any]:
    return {"id": "acme", "key_sha256": hash_key("k1"), "band": "high", **changes}


def write(path: Path, content: Any) -> Path:
    file = path / "tenants.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    second_key = entry(key_sha256=hash_key("k2"))
    other = entry(id="b-2", key_sha256=hash_key("k3"), band="low")
    tenants = load_tenants(write(tmp_path, {"tenants": [entry(), second_key, other]}))
    assert tenants.authenticate("k1") == tenants.authenticate("k2") == Tenant("acme", Band.HIGH)
    assert tenants.authenticate("k3") == Tenant("b-2", Band.LOW)
    assert len(tenants) == 2


@pytest.mark.parametrize(
    ("key", "reason"),
    [(None, Reason.MISSING_CREDENTIAL), ("k2", Reason.UNKNOWN_CREDENTIAL), (hash_key("k1"), Reason.UNKNOWN_CREDENTIAL)],
)
def test_no_other_key_does(tmp_path: Path, key: str | None, reason: Reason) -> None:
    tenants = load_tenants(write(tmp_path, {"tenants": [entry()]}))
    with pytest.raises(UnauthenticatedError) as caught:
        tenants.authenticate(key)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tenants.json"),
        ([], 'a list "tenants"'),
        ({"tenants": {}}, 'a list "tenants"'),
        ({"tenants": ["x"]}, "entry 1"),
        ({"tenants": [entry(extra=1)]}, "exactly id, key_sha256 and band"),
        ({"tenants": [entry(id="Acme")]}, "id must match"),
        ({"tenants": [entry(id="a/b")]}, "id must match"),
        ({"tenants": [entry(id="a" * 65)]}, "id must match"),
        ({"tenants": [entry(key_sha256="k1")]}, "64 hexadecimal digits"),
        ({"tenants": [entry(band="first")]}, "high, normal or low"),
        ({"tenants": [entry(), entry(id="b")]}, "the same key"),
        ({"tenants": [entry(), entry(key_sha256=hash_key("k2"), band="low")]}, "different bands"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(TenantsFileError, match=message):
        load_tenants(write(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match="nothing-here"):
        load_tenants(tmp_path / "nothing-here")


def test_cache_salts_are_the_tenants_own() -> None:
    first, second = Tenant("a", Band.HIGH), Tenant("b", Band.HIGH)
    assert first.cache_salt != second.cache_salt
    assert first.cache_salt == Tenant("a", Band.LOW).cache_salt
