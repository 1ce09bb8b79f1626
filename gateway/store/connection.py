"""The connection to Redis: named scripts, many callers, one translation of errors, calls that survive cancelling."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

import hiredis
from redis import exceptions
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.errors import UnavailableError
from common.types import Reason

T = TypeVar("T")
Argument = str | int
_RETRY_AFTER_S = 1.0
_UNREACHABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    TimeoutError,
    OSError,
)


def connect(url: str, *, max_connections: int, timeout_s: float, block_s: float = 0.0) -> Redis:
    """A client that sends every command once: a script whose reply was lost may have run, so its caller must decide.

    Replies are bytes of protocol 2. `timeout_s` bounds connecting, and each reply beyond `block_s`, the time for which
    the caller's commands may block in the server. Nothing is sent before the first command.
    """
    return Redis.from_pool(_pool(url, max_connections, timeout_s, timeout_s + block_s))


def _pool(url: str, max_connections: int, connect_timeout_s: float, timeout_s: float | None) -> ConnectionPool:
    return ConnectionPool.from_url(
        url,
        max_connections=max_connections,
        socket_timeout=timeout_s,
        socket_connect_timeout=connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        protocol=2,
        decode_responses=False,
    )


@contextmanager
def store_errors() -> Iterator[None]:
    """Turns every way in which the store can be out of reach into UnavailableError(STORE_UNAVAILABLE)."""
    try:
        yield
    except _UNREACHABLE as error:
        raise _unavailable() from error


def _unavailable() -> UnavailableError:
    return UnavailableError(
        "the store cannot be reached", reason=Reason.STORE_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S
    )


def text(reply: Any) -> str:
    """A bulk string of a reply."""
    if not isinstance(reply, bytes):
        raise TypeError(f"a string was expected in the store's reply, not {reply!r}")
    return reply.decode()


def microseconds(seconds: float) -> int:
    """A duration as scripts take it."""
    return round(seconds * 1e6)


def read_script(name: str) -> str:
    """The text of a Lua file of `scripts/`."""
    return files(__package__).joinpath("scripts", f"{name}.lua").read_text()


class Script:
    """A Lua file of `scripts/`, behind those it builds on; sent by digest, in full if the server does not know it."""

    def __init__(self, name: str, preludes: Sequence[str], read: Callable[[str], str] = read_script) -> None:
        self.source = "".join(read(part) for part in (*preludes, name))
        self.digest = sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        self._name = name

    def __repr__(self) -> str:
        return f"Script({self._name})"


class _Call(NamedTuple):
    """A script that has been sent, or is about to be; `source` in place of its digest if the server did not know it."""

    script: Script
    arguments: tuple[Argument, ...]  # with the keys, and their number in front
    reply: asyncio.Future[Any]

    def packed(self, *, in_full: bool) -> bytes:
        head = ("EVAL", self.script.source) if in_full else ("EVALSHA", self.script.digest)
        packed: bytes = hiredis.pack_command((*head, *self.arguments))  # type: ignore[arg-type]  # says: one argument
        return packed


class _Wire:
    """One connection from its making to its end. Replies come in the order of the calls, whoever still waits for them.

    Calls of one turn of the event loop are written together. It ends when a reply, or the connection itself, is not
    there within the timeout: a server that answers somebody is not out of reach, however many wait.
    """

    def __init__(self, connection: AbstractConnection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._calls: deque[_Call] = deque()
        self._has_unsent = asyncio.Event()
        self._heard_at = 0.0  # or when the first of the calls came
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None  # somebody waits for the last reply
        self.is_over = False
        self._life = self._loop.create_task(self._live())

    def send(self, call: _Call, *, in_full: bool = False) -> None:
        """Sends a call behind all others."""
        packed = call.packed(in_full=in_full)
        if not self._calls:
            self._heard_at = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout_s, self._look)
        self._calls.append(call)
        self._unsent.append(packed)
        self._has_unsent.set()

    async def _live(self) -> None:
        writing: asyncio.Task[None] | None = None
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
            writing = self._loop.create_task(self._write())
            while True:
                await self._read()
        except (exceptions.RedisError, OSError) as error:
            self._end(error)
        finally:
            self._end(exceptions.ConnectionError("the connection was closed"))
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            await self._connection.disconnect(nowait=True)

    async def _write(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            unsent, self._unsent = self._unsent, []
            # A failure closes the connection, which the reader notices.
            await self._connection.send_packed_command(unsent, check_health=False)

    async def _read(self) -> None:
        try:
            reply, error = await self._connection.read_response(disable_decoding=True), None
        except exceptions.ResponseError as it:
            reply, error = None, it
        self._heard_at = self._loop.time()
        call = self._calls.popleft()
        if self._drained is not None and not self._calls:
            self._drained.set_result(None)
        if isinstance(error, exceptions.NoScriptError):  # it has not run: resending it is safe
            self.send(call, in_full=True)
        elif call.reply.done():  # its caller has been cancelled
            return
        elif error is None:
            call.reply.set_result(reply)
        else:
            call.reply.set_exception(_translated(error))

    def _look(self) -> None:
        self._timer = None
        if not self._calls:
            return
        left_s = self._heard_at + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
            return
        self._end(TimeoutError("the store does not answer"))
        self._life.cancel()

    def _end(self, error: Exception) -> None:
        self.is_over = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.reply.done():
                call.reply.set_exception(_translated(error))

    async def close(self) -> None:
        """Waits for the replies of what was sent, and ends."""
        if self._calls and not self.is_over:
            self._drained = self._loop.create_future()
            await self._drained
        if self._timer is not None:
            self._timer.cancel()
        self._life.cancel()
        await asyncio.gather(self._life, return_exceptions=True)


def _translated(error: Exception) -> Exception:
    if not isinstance(error, _UNREACHABLE):
        return error
    unavailable = _unavailable()
    unavailable.__cause__ = error
    return unavailable


class Link:
    """Runs a store's scripts. A call that was sent runs to its end even if its caller is cancelled.

    Made without I/O; belongs to one event loop. It connects with the first call, and anew with the first one after the
    connection broke; what was sent until then is told so and not sent again.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s`: for connecting, and for each reply. Raises ValueError if the URL makes no sense."""
        self._timeout_s = timeout_s
        self._pool = _pool(url, 1, timeout_s, None)
        self._wire: _Wire | None = None
        self._steps: set[asyncio.Task[Any]] = set()

    def send(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """Sends a script now. The reply fails with UnavailableError(STORE_UNAVAILABLE) if the store is out of reach."""
        if self._wire is None or self._wire.is_over:
            connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
            self._wire = _Wire(connection, self._timeout_s)
        reply = asyncio.get_running_loop().create_future()
        self._wire.send(_Call(script, (len(keys), *keys, *arguments), reply))
        return reply

    def start(self, step: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts calls that nobody can cancel, and that `close` waits for."""
        task = asyncio.get_running_loop().create_task(step)
        self._steps.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._steps.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a caller that was cancelled does not come back for it

    async def finish_steps(self) -> None:
        """Waits for what was started; each call is bounded by the timeout."""
        while self._steps:
            await asyncio.wait(self._steps)

    async def close(self) -> None:
        """Waits for the calls that are under way, and ends the connection."""
        await self.finish_steps()
        if self._wire is not None:
            await self._wire.close()
