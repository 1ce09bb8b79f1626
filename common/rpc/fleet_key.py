"""The deployment's secrets: what gateways and workers show each other, and what operators show."""

from __future__ import annotations

import hmac

from common.errors import UnauthenticatedError
from common.rpc.interceptors import Authenticator
from common.types import Reason


def fleet_metadata(fleet_key: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that shows the key; nothing if it is empty."""
    return (("authorization", f"Bearer {fleet_key}"),) if fleet_key else ()


def fleet_authenticator(fleet_key: str) -> Authenticator:
    """Accepts calls that show the fleet key. An empty key accepts nobody."""
    return _authenticator(fleet_key, "fleet key")


def admin_authenticator(admin_key: str) -> Authenticator:
    """Accepts calls that show the operators' key. An empty key accepts nobody."""
    return _authenticator(admin_key, "admin key")


def _authenticator(key: str, name: str) -> Authenticator:

    def authenticate(shown: str | None) -> None:
        if shown is None:
            message = f"no {name}: send metadata 'authorization: Bearer <{name}>'"
            raise UnauthenticatedError(message, reason=Reason.MISSING_CREDENTIAL)
        if not key or not hmac.compare_digest(shown.encode(), key.encode()):
            raise UnauthenticatedError(f"the {name} is not the one of this deployment")

    return authenticate
