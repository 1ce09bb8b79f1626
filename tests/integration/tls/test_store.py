"""The store behind TLS: a proxy that ends it stands in front of the server, which may have been built without it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import pytest

from common.errors import UnavailableError
from common.local_redis import LocalRedis
from gateway.store.connection import Link, Script
from tests.integration.tls.certificates import Authority

ECHO = Script("test", (), lambda _: "return ARGV[1]")


@contextlib.asynccontextmanager
async def behind_tls(server: LocalRedis, context: ssl.SSLContext) -> AsyncIterator[int]:
    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                writer.write(part)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(str(server.socket_path))
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as proxy:
        yield proxy.sockets[0].getsockname()[1]


async def test_a_link_speaks_tls_and_only_to_whom_it_trusts(
    tmp_path_factory: pytest.TempPathFactory, ours: Authority, theirs: Authority
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = ours.sign("store")
    context.load_cert_chain(certificate.cert, certificate.key)
    with LocalRedis(tmp_path_factory.mktemp("redis")) as server:
        async with behind_tls(server, context) as port:
            trusting = Link(f"rediss://127.0.0.1:{port}?ssl_ca_certs={ours.ca}", timeout_s=10.0)
            assert await trusting.send(ECHO, [], ["heard"]) == b"heard"
            await trusting.close()
            wary = Link(f"rediss://127.0.0.1:{port}?ssl_ca_certs={theirs.ca}", timeout_s=10.0)
            with pytest.raises(UnavailableError):
                await wary.send(ECHO, [], ["heard"])
            await wary.close()
