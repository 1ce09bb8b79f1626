"""How the command line connects: the options that come before a command and concern the connection itself."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import grpc
import typer

from client.client import Client, ClientOptions
from common.rpc.tls import TlsError, channel_credentials


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS connection, empty where there is none, and the name that the server must have."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    name: str = ""

    def credentials(self, *, is_wanted: bool) -> grpc.ChannelCredentials | None:
        """None for plain text, which is what is neither `is_wanted` otherwise nor has files."""
        if not is_wanted and not (self.ca or self.cert or self.key):
            return None
        return channel_credentials(self.ca, self.cert, self.key, names=("--tls-ca", "--tls-cert", "--tls-key"))


TLS_FILES: ContextVar[TlsFiles] = ContextVar("tls_files", default=TlsFiles())  # noqa: B039 - it is frozen
"""What the options before the command say."""


async def connect(address: str, key: str, tls: bool) -> Client:
    """A client, made in the event loop, as a channel belongs to the loop that it is made in. Raises BadParameter."""
    files = TLS_FILES.get()
    try:
        credentials = files.credentials(is_wanted=tls)
        return Client(address, key, options=ClientOptions(server_name=files.name), credentials=credentials)
    except (ValueError, TlsError) as error:
        raise typer.BadParameter(str(error)) from error
