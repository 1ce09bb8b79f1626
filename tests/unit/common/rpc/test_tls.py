from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from common.config import Settings
from common.rpc.tls import PLAIN_TEXT, TlsError, channel_credentials, fleet_dialling, server_credentials
from tests.integration.tls.certificates import Authority, Certificate


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "a")


@pytest.fixture(scope="module")
def own(authority: Authority) -> Certificate:
    return authority.sign("own")


@pytest.fixture(scope="module")
def other(authority: Authority) -> Certificate:
    return authority.sign("other")


def test_without_files_everything_is_plain_text() -> None:
    assert server_credentials(Settings()) is None
    assert fleet_dialling(Settings()) is PLAIN_TEXT


def test_with_files_nothing_is(authority: Authority, own: Certificate) -> None:
    assert server_credentials(Settings(tls_cert=own.cert, tls_key=own.key, tls_client_ca=authority.ca)) is not None
    dialling = fleet_dialling(Settings(fleet_tls_ca=authority.ca, fleet_tls_name="worker.example"))
    assert dialling.credentials is not None
    assert dialling.server_name == "worker.example"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_cert": "own.cert"}, ["tls_cert", "tls_key", "missing"]),
        ({"tls_key": "own.key"}, ["tls_cert", "tls_key", "missing"]),
        ({"tls_client_ca": "ca"}, ["tls_client_ca", "tls_cert"]),
        ({"tls_cert": "nowhere", "tls_key": "own.key"}, ["tls_cert nowhere", "No such file"]),
        ({"tls_cert": "own.cert", "tls_key": "other.key"}, ["tls_key", "mismatch"]),
        ({"tls_cert": "own.cert", "tls_key": "own.cert"}, ["tls_key"]),
        ({"tls_cert": "own.cert", "tls_key": "own.key", "tls_client_ca": "own.key"}, ["tls_client_ca"]),
        ({"fleet_tls_cert": "own.cert", "fleet_tls_key": "own.key"}, ["fleet_tls_ca"]),
        ({"fleet_tls_ca": "nowhere"}, ["fleet_tls_ca nowhere", "No such file"]),
        ({"fleet_tls_ca": "ca", "fleet_tls_key": "own.key"}, ["fleet_tls_cert", "missing"]),
    ],
)
def test_files_that_cannot_be_used_are_named(
    given: dict[str, str], words: list[str], authority: Authority, own: Certificate, other: Certificate
) -> None:
    paths = {"ca": authority.ca, "own.cert": own.cert, "own.key": own.key, "other.key": other.key}
    settings = Settings(**{name: paths.get(value, value) for name, value in given.items()})  # type: ignore[arg-type]
    read = fleet_dialling if any(name.startswith("fleet") for name in given) else server_credentials
    with pytest.raises(TlsError) as caught:
        read(settings)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_key_with_a_password_is_refused_and_not_asked_for(own: Certificate, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    lock = ["openssl", "pkey", "-in", own.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(lock, check=True, timeout=60)
    with pytest.raises(TlsError, match="key"):
        channel_credentials("", own.cert, str(locked))
