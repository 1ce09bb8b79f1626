"""TLS of servers and of those who dial them: PEM files are read and checked at the start, and become credentials."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from common.config import Settings

_T = TypeVar("_T")
_Option = tuple[str, int | str]


class TlsError(OSError):
    """The TLS files cannot be used; the message says which setting and why."""


@dataclass(frozen=True, slots=True)
class Dialling:
    """How servers are dialled: in plain text, or with TLS by these credentials."""

    credentials: grpc.ChannelCredentials | None = None
    server_name: str = ""  # that a server's certificate must carry; empty: the host that is dialled

    def channel(self, address: str, options: Sequence[_Option] = ()) -> grpc.aio.Channel:
        """A channel to host:port, made without I/O."""
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        name: list[_Option] = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return grpc.aio.secure_channel(address, self.credentials, options=[*options, *name])


PLAIN_TEXT = Dialling()
"""Without TLS, for one host or a trusted network."""


def server_credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Of the program's own server; None if no certificate is configured: plain text. Raises TlsError."""
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if not cert and not key:
        if client_ca:
            raise TlsError("tls_client_ca is set, and needs tls_cert and tls_key beside it")
        return None
    pair = _read_pair("tls_cert", cert, "tls_key", key)
    authorities = _read_authorities("tls_client_ca", client_ca) if client_ca else None
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)


def fleet_dialling(settings: Settings) -> Dialling:
    """How the program dials the other programs of its deployment. Raises TlsError."""
    names = ("fleet_tls_ca", "fleet_tls_cert", "fleet_tls_key")
    if not settings.fleet_tls_ca:
        if settings.fleet_tls_cert or settings.fleet_tls_key:
            raise TlsError("fleet_tls_cert is set, and needs fleet_tls_ca beside it")
        return PLAIN_TEXT
    files = (settings.fleet_tls_ca, settings.fleet_tls_cert, settings.fleet_tls_key)
    return Dialling(channel_credentials(*files, names=names), settings.fleet_tls_name)


def channel_credentials(
    ca: str = "", cert: str = "", key: str = "", *, names: tuple[str, str, str] = ("ca", "cert", "key")
) -> grpc.ChannelCredentials:
    """Of a side that dials: PEM files of the authorities it trusts (empty: the system's), and of its own certificate
    and key for servers that ask for one. Raises TlsError, which calls the files by `names`."""
    authorities = _read_authorities(names[0], ca) if ca else None
    own_key, own_cert = _read_pair(names[1], cert, names[2], key) if cert or key else (None, None)
    return grpc.ssl_channel_credentials(authorities, own_key, own_cert)


def _read_pair(cert_name: str, cert: str, key_name: str, key: str) -> tuple[bytes, bytes]:
    """A private key and its certificate chain, which belong to each other."""
    if not cert or not key:
        raise TlsError(f"{cert_name} and {key_name} belong together, and one of them is missing")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A key that needs a password is refused; left alone, the library would ask for it on the terminal.
    _checked(f"{cert_name} {cert} with {key_name} {key}", lambda: context.load_cert_chain(cert, key, password=b""))
    return Path(key).read_bytes(), Path(cert).read_bytes()


def _read_authorities(name: str, path: str) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _checked(f"{name} {path}", lambda: context.load_verify_locations(path))
    return Path(path).read_bytes()


def _checked(what: str, load: Callable[[], _T]) -> _T:
    try:
        return load()
    except OSError as error:  # ssl.SSLError is one
        raise TlsError(f"{what}: {error.strerror or error}") from error
