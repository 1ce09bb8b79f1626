from __future__ import annotations

import pytest

from common.errors import UnauthenticatedError
from common.rpc.fleet_key import fleet_authenticator, fleet_metadata


def test_the_key_opens() -> None:
    [(name, value)] = fleet_metadata("secret")
    assert (name, value) == ("authorization", "Bearer secret")
    fleet_authenticator("secret")("secret")


@pytest.mark.parametrize(
    ("key", "shown"), [("secret", None), ("secret", "Secret"), ("secret", ""), ("", ""), ("", None)]
)
def test_nothing_else_does_and_an_empty_key_opens_to_nobody(key: str, shown: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        fleet_authenticator(key)(shown)


def test_an_empty_key_is_not_sent() -> None:
    assert fleet_metadata("") == ()
