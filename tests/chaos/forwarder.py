"""Forwards TCP connections: `python forwarder.py LISTEN_HOST:PORT TARGET_HOST:PORT`.

A process of its own, so that stopping it is a network that swallows everything: connections stay open, nothing comes
through, nothing is refused. Killing it is a network that says so.
"""

from __future__ import annotations

import asyncio
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while block := await reader.read(65536):
            writer.write(block)
            await writer.drain()
    except OSError:
        pass  # either side is gone, which the other one learns by the close
    finally:
        writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    try:
        target_reader, target_writer = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))


async def _serve(listen: str, target: str) -> None:
    host, _, port = listen.rpartition(":")
    target_host, _, target_port = target.rpartition(":")
    server = await asyncio.start_server(
        lambda reader, writer: _forward(reader, writer, target_host, int(target_port)), host, int(port)
    )
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2]))
