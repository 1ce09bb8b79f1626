"""The deployment's shared secret, which gateways and workers show each other."""

from __future__ import annotations

import hmac

from common.errors import UnauthenticatedError
from common.rpc.interceptors import Authenticator
from common.types import Reason


def fleet_metadata(fleet_key: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that shows the key; nothing if it is empty."""
    return (("authorization", f"Bearer {fleet_key}"),) if fleet_key else ()


def fleet_authenticator(fleet_key: str) -> Authenticator:
    """Accepts calls that show the key. An empty key accepts nobody."""

    def authenticate(shown: str | None) -> None:
        if shown is None:
            message = "no fleet key: send metadata 'authorization: Bearer <fleet key>'"
            raise UnauthenticatedError(message, reason=Reason.MISSING_CREDENTIAL)
        if not fleet_key or not hmac.compare_digest(shown.encode(), fleet_key.encode()):
            raise UnauthenticatedError("the fleet key is not the one of this deployment")

    return authenticate
