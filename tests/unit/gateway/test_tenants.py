from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UnauthenticatedError
from common.types import Band, Reason
from gateway.admission.limits import TenantLimits
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
        ({"tenants": [entry(extra=1)]}, "must have id, key_sha256 and band"),
        ({"tenants": [entry(id="Acme")]}, "id must match"),
        ({"tenants": [entry(id="a/b")]}, "id must match"),
        ({"tenants": [entry(id="a" * 65)]}, "id must match"),
        ({"tenants": [entry(key_sha256="k1")]}, "64 hexadecimal digits"),
        ({"tenants": [entry(band="first")]}, "high, normal or low"),
        ({"tenants": [entry(), entry(id="b")]}, "the same key"),
        ({"tenants": [entry(), entry(key_sha256=hash_key("k2"), band="low")]}, "different bands"),
        ({"tenants": [entry(), entry(key_sha256=hash_key("k2"), weight=2)]}, "different bands, weights or limits"),
        ({"tenants": [entry(weight=0)]}, "weight must be an integer from 1 to 1000"),
        ({"tenants": [entry(weight=1.5)]}, "weight must be"),
        ({"tenants": [entry(weight=True)]}, "weight must be"),
        ({"tenants": [entry(limits=[])]}, r"entry 1 \(acme\): limits"),
        ({"tenants": [entry(limits={"rpm": 1})]}, "limits: rpm"),
        ({"tenants": [entry(limits={"requests_per_minute": -1})]}, "limits: requests_per_minute: .*greater"),
        ({"tenants": [entry(limits={"requests_per_minute": "9"})]}, "limits: requests_per_minute: .*integer"),
        ({"tenants": [entry(limits={"tokens_per_minute": 1.5})]}, "limits: tokens_per_minute"),
        ({"tenants": [entry(limits={"max_output": 0})]}, "limits: max_output: .*greater"),
        ({"tenants": [entry(limits={"max_queue_wait_s": 0})]}, "limits: max_queue_wait_s"),
        ({"tenants": [entry(limits={"time_zone": "Mars/Olympus"})]}, "limits: time_zone: .*name of a time zone"),
        ({"tenants": [entry(limits={"time_zone": "../etc"})]}, "limits: time_zone"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(TenantsFileError, match=message):
        load_tenants(write(tmp_path, content))


def test_limits_and_weight_are_read(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "tokens_per_day": 0, "max_queue_wait_s": 1.5, "time_zone": "Europe/Berlin"}
    tenants = load_tenants(write(tmp_path, {"tenants": [entry(weight=3, limits=limits)]}))
    expected = TenantLimits(requests_per_minute=60, tokens_per_day=0, max_queue_wait_s=1.5, time_zone="Europe/Berlin")
    assert tenants.authenticate("k1") == Tenant("acme", Band.HIGH, 3, expected)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match="nothing-here"):
        load_tenants(tmp_path / "nothing-here")


def test_cache_salts_are_the_tenants_own() -> None:
    first, second = Tenant("a", Band.HIGH), Tenant("b", Band.HIGH)
    assert first.cache_salt != second.cache_salt
    assert first.cache_salt == Tenant("a", Band.LOW).cache_salt
