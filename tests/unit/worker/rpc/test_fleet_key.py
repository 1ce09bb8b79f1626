from __future__ import annotations

import pytest

from common.errors import UnauthenticatedError
from common.types import Reason
from worker.rpc.fleet_key import FleetKey


def test_the_right_key_is_taken_from_any_host() -> None:
    key = FleetKey("secret")
    key.authenticate("secret")
    key.check_peer("ipv4:10.1.2.3:4000")


@pytest.mark.parametrize("token", ["", "Secret", "secret ", "secre", "sécret"])
def test_a_wrong_key_is_refused(token: str) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        FleetKey("secret").authenticate(token)
    assert caught.value.reason is Reason.UNKNOWN_CREDENTIAL
    assert "secret" not in str(caught.value)


def test_a_missing_key_is_named_as_missing() -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        FleetKey("secret").authenticate(None)
    assert caught.value.reason is Reason.MISSING_CREDENTIAL


@pytest.mark.parametrize(
    "peer",
    ["ipv4:127.0.0.1:4000", "ipv4:127.8.9.1:1", "ipv6:[::1]:4000", "ipv6:%5B::1%5D:4000", "unix:/run/x", "unix:"],
)
def test_without_a_key_the_own_host_is_trusted(peer: str) -> None:
    FleetKey("").authenticate(None)
    FleetKey("").check_peer(peer)


@pytest.mark.parametrize(
    "peer",
    ["ipv4:10.0.0.1:4000", "ipv4:128.0.0.1:1", "ipv6:[fe80::1]:4000", "ipv6:[::ffff:10.0.0.1]:1", "", "dns:localhost"],
)
def test_without_a_key_other_hosts_are_refused(peer: str) -> None:
    with pytest.raises(UnauthenticatedError):
        FleetKey("").check_peer(peer)


def test_a_mapped_loopback_address_is_the_own_host() -> None:
    FleetKey("").check_peer("ipv6:[::ffff:127.0.0.1]:4000")
