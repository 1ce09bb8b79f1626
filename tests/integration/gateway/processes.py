"""Workers as processes that can be killed and stopped, and a wire to them that can be made to swallow everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from launcher.process import Child


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, address: str, process: Child) -> None:
        self.address = address
        self._process = process

    def send(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


@asynccontextmanager
async def scripted_worker_process(folder: Path, **fields: Any) -> AsyncIterator[WorkerProcess]:
    """A `ScriptedWorker` with these fields; `spell` is a text that it says again and again."""
    name = f"worker-{fields['worker_id']}"
    command = [sys.executable, "-m", "tests.support.scripted_worker", json.dumps(fields)]
    child = await Child.start(name, command, os.environ, folder)
    try:
        async with asyncio.timeout(240):
            while not child.tail():  # it writes its port when it listens
                assert child.is_running, await child.died()
                await asyncio.sleep(0.02)
        yield WorkerProcess(f"127.0.0.1:{child.tail()[-1]}", child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGCONT)
        child.kill()
        await child.stop(drain_s=5)


class Wire:
    """Forwards TCP connections to an address. A black hole keeps them open and lets nothing through any more.

    Once it heals, new connections work; the old ones have been forgotten and stay silent.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._is_passing = asyncio.Event()  # replaced when it heals: old connections wait for the former one
        self._is_passing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = "127.0.0.1:" + str(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def become_black_hole(self) -> None:
        self._is_passing.clear()

    def heal(self) -> None:
        self._is_passing = asyncio.Event()
        self._is_passing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        is_passing = self._is_passing
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_forward(reader, far_writer, is_passing))
                both.create_task(_forward(far_reader, writer, is_passing))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            far_writer.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_passing: asyncio.Event) -> None:
    while data := await reader.read(65536):
        await is_passing.wait()
        writer.write(data)
        await writer.drain()
    writer.close()
