"""Free ports on the loopback interface."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Different ports nobody listens on now; another program may still take one, and then its user says so at start."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
