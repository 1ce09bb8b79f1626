"""Who may command a worker: holders of the fleet key, or, where none is configured, programs on the same host."""

from __future__ import annotations

import ipaddress

from common.errors import UnauthenticatedError
from common.rpc.fleet_key import fleet_authenticator
from common.types import Reason


class FleetKey:
    """The deployment's shared secret. Empty: calls from this host only, without a key."""

    def __init__(self, key: str) -> None:
        self._authenticate = fleet_authenticator(key) if key else None

    def authenticate(self, token: str | None) -> None:
        """Raises UnauthenticatedError if a key is needed and `token` is not it."""
        if self._authenticate is not None:
            self._authenticate(token)

    def check_peer(self, peer: str) -> None:
        """Raises UnauthenticatedError for another host's call where no key is configured. `peer` as gRPC writes it."""
        if self._authenticate is None and not _is_loopback(peer):
            raise UnauthenticatedError(
                "this worker has no fleet key and takes calls from its own host only; set TIDEGATE_FLEET_KEY",
                reason=Reason.MISSING_CREDENTIAL,
            )


def _is_loopback(peer: str) -> bool:
    """Understands `ipv4:127.0.0.1:5000`, `ipv6:[::1]:5000` (also percent-encoded) and `unix:...`."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return True
    host = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
