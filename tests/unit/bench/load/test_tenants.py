"""Who sends: by share, by a trace's names, and from files and options."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from bench.load.tenants import (
    Origin,
    Sender,
    TenantsError,
    assign,
    describe,
    load_senders,
    local_tenants,
    parse_bands,
    parse_sender,
)
from common.types import Band
from gateway.admission.limits import TenantLimits
from gateway.tenants import load_tenants
from launcher.tenants import write_tenants_file


def test_requests_are_shared_out_by_tenant_and_band() -> None:
    senders = [Sender("a", "ka", share=3), Sender("b", "kb", share=1)]
    origins = assign([""] * 8000, senders, {Band.HIGH: 1, Band.LOW: 4}, random.Random(1))
    tenants = Counter(origin.sender.tenant_id for origin in origins)
    bands = Counter(origin.band for origin in origins)
    assert tenants["a"] / 8000 == pytest.approx(0.75, abs=0.02)
    assert bands[Band.LOW] / 8000 == pytest.approx(0.80, abs=0.02)


def test_a_traces_clients_keep_to_their_tenants() -> None:
    senders = [Sender("a", "ka"), Sender("b", "kb")]
    origins = assign(["x", "b", "y", "x", "z"], senders, {}, random.Random(1))
    assert [origin.sender.tenant_id for origin in origins] == ["a", "b", "b", "a", "a"]
    assert {origin.band for origin in origins} == {None}


def test_a_request_is_never_raised_above_its_tenants_band() -> None:
    assert Origin(Sender("a", "k", band=Band.NORMAL), Band.HIGH).band_name == "normal"
    assert Origin(Sender("a", "k", band=Band.NORMAL), Band.LOW).band_name == "low"
    assert Origin(Sender("a", "k")).band_name == "tenant's own"


def test_a_file_of_tenants(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    entries = [{"id": "a", "api_key": "ka", "share": 2, "band": "low"}, {"id": "b", "api_key": "kb"}]
    path.write_text(json.dumps({"tenants": entries}))
    senders = load_senders(path)
    assert senders == (Sender("a", "ka", 2.0, Band.LOW), Sender("b", "kb"))
    assert "ka" not in repr(senders) + json.dumps(describe(senders))


def test_a_file_makes_the_tenants_of_a_local_deployment(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    limits = {"requests_per_minute": 30}
    paid = {"id": "paid", "share": 2, "band": "high", "weight": 3, "limits": limits}
    path.write_text(json.dumps({"tenants": [paid, {"id": "free"}]}))
    senders = load_senders(path, is_local=True)
    assert [(each.tenant_id, each.share, each.band) for each in senders] == [
        ("paid", 2.0, Band.HIGH),
        ("free", 1.0, Band.NORMAL),
    ]
    told = tmp_path / "gateway.json"
    write_tenants_file(local_tenants(senders), told)
    tenants = load_tenants(told)
    found = tenants.authenticate(senders[0].api_key)
    assert (found.tenant_id, found.band, found.weight) == ("paid", Band.HIGH, 3)
    assert found.limits == TenantLimits(requests_per_minute=30)
    assert tenants.authenticate(senders[1].api_key).band is Band.NORMAL
    path.write_text('{"tenants": [{"id": "a", "api_key": "k"}]}')
    with pytest.raises(TenantsError, match="must have id"):
        load_senders(path, is_local=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "must be an object"),
        ('{"tenants": []}', "not empty"),
        ('{"tenants": [{"id": "a"}]}', "entry 1: must have id and api_key"),
        ('{"tenants": [{"id": "a", "api_key": "k", "share": 0}]}', "share must be a number above 0"),
        ('{"tenants": [{"id": "a", "api_key": "k", "band": "top"}]}', "'top' is not a band"),
        ("{", "t.json"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(TenantsError, match=said):
        load_senders(path)


def test_options() -> None:
    assert parse_sender("a=k=1") == Sender("a", "k=1")
    assert parse_sender("a:2.5=k") == Sender("a", "k", 2.5)
    assert parse_bands("high=1,low=3") == {Band.HIGH: 1.0, Band.LOW: 3.0}
    for text in ("a", "=k", "a:0=k", "a:x=k", "a="):
        with pytest.raises(TenantsError, match="ID=KEY"):
            parse_sender(text)
    for text in ("top=1", "low=0", "low=x", ""):
        with pytest.raises(TenantsError):
            parse_bands(text)
