from __future__ import annotations

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread

import grpc
import pytest

from common import event_loop


async def policies() -> tuple[int, int]:
    """Of the thread of the loop, and of one that is started in it."""
    found: list[int] = []
    thread = Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return os.sched_getscheduler(0), found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels have no such policy")
def test_no_thread_of_a_program_pushes_another_aside() -> None:
    with ThreadPoolExecutor(1) as other:  # so that the tests' own thread stays as it is
        assert other.submit(lambda: event_loop.run(policies())).result() == (os.SCHED_BATCH, os.SCHED_BATCH)


def test_a_sandbox_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer() -> int:
        return 42

    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbid)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: event_loop.run(answer())).result() == 42


class PollerCompletionQueue:
    """As the library's own: a byte for each event, and a reader that takes all events, but one byte."""

    def __init__(self) -> None:
        self.signals, self._signalling = socket.socketpair()
        self.signals.setblocking(False)
        self.events: list[int] = []
        self.seen: list[list[int]] = []

    def put(self, event: int) -> None:
        self.events.append(event)
        self._signalling.send(b"1")

    def handle(self, _: object) -> None:
        self.signals.recv(1)
        self.seen.append(self.events[:])
        self.events.clear()

    def close(self) -> None:
        self.signals.close()
        self._signalling.close()


def test_signals_of_events_that_are_taken_do_not_pile_up() -> None:
    async def program() -> list[list[int]]:
        loop, queue = asyncio.get_running_loop(), PollerCompletionQueue()
        loop.add_reader(queue.signals, partial(queue.handle, loop))
        for first in (0, 100):
            for event in range(first, first + 100):
                queue.put(event)
            for _ in range(10):
                await asyncio.sleep(0)
        loop.remove_reader(queue.signals)
        with pytest.raises(BlockingIOError):
            queue.signals.recv(1)
        queue.close()
        return queue.seen

    with ThreadPoolExecutor(1) as other:
        seen = other.submit(lambda: event_loop.run(program())).result()
    assert seen == [list(range(100)), list(range(100, 200))]


def test_the_library_reads_its_signals_as_is_thought_here(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[socket.socket] = []
    draining = event_loop._draining
    monkeypatch.setattr(event_loop, "_draining", lambda fd, callback: (drained.append(fd), draining(fd, callback))[1])

    async def program() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
        await server.stop(0)

    with ThreadPoolExecutor(1) as other:
        other.submit(lambda: event_loop.run(program())).result()
    assert drained, "else the loop has nothing of gRPC to drain: look at how grpc.aio watches its events now"


def test_other_readers_are_left_alone() -> None:
    async def program() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        read: asyncio.Future[bytes] = loop.create_future()
        loop.add_reader(ours, lambda: read.done() or read.set_result(ours.recv(8)))
        theirs.send(b"hello")
        found = await read
        loop.remove_reader(ours)
        ours.close()
        theirs.close()
        return found

    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: event_loop.run(program())).result() == b"hello"
