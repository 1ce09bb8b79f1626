"""How commands connect, by the options that come before them, and what they say when a call fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import grpc
import typer

from client.client import Client, ClientOptions
from client.errors import ClientError
from client.terminal import note, note_error
from common.rpc.tls import TlsError, channel_credentials

EXIT_FAILED, EXIT_TRY_LATER, EXIT_INTERRUPTED = 1, 3, 130
_TRY_LATER = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}


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


@contextmanager
def secured(tls: bool) -> Iterator[tuple[grpc.ChannelCredentials | None, ClientOptions]]:
    """Credentials and options for a client that is made in the block. Raises BadParameter for what it cannot use."""
    files = TLS_FILES.get()
    try:
        yield files.credentials(is_wanted=tls), ClientOptions(server_name=files.name)
    except (ValueError, TlsError) as error:
        raise typer.BadParameter(str(error)) from error


async def connect(address: str, key: str, tls: bool) -> Client:
    """A client, made in the event loop, as a channel belongs to the loop that it is made in. Raises BadParameter."""
    with secured(tls) as (credentials, options):
        return Client(address, key, options=options, credentials=credentials)


@contextmanager
def failures() -> Iterator[None]:
    """What went wrong, in a line and an exit status."""
    try:
        yield
    except ClientError as error:
        note_error(error)
        raise typer.Exit(EXIT_TRY_LATER if error.status in _TRY_LATER else EXIT_FAILED) from error
    except KeyboardInterrupt:
        note("[cancelled]")
        raise typer.Exit(EXIT_INTERRUPTED) from None
