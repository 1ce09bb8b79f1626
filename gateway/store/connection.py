"""The connection to Redis: a bounded pool, named scripts, one translation of errors, calls that survive cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis
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
    pool: ConnectionPool = ConnectionPool.from_url(
        url,
        max_connections=max_connections,
        socket_timeout=timeout_s + block_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        protocol=2,
        decode_responses=False,
    )
    return Redis.from_pool(pool)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turns every way in which the store can be out of reach into UnavailableError(STORE_UNAVAILABLE)."""
    try:
        yield
    except _UNREACHABLE as error:
        raise UnavailableError(
            "the store cannot be reached", reason=Reason.STORE_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S
        ) from error


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
        self._source = "".join(read(part) for part in (*preludes, name))
        self._digest = sha1(self._source.encode(), usedforsecurity=False).hexdigest()
        self._name = name

    def __repr__(self) -> str:
        return f"Script({self._name})"

    async def run(self, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Runs it and returns the server's reply. An unknown script has not run: resending it is safe."""
        call = (len(keys), *keys, *arguments)
        try:
            return await client.execute_command("EVALSHA", self._digest, *call)  # type: ignore[no-untyped-call]
        except exceptions.NoScriptError:
            return await client.execute_command("EVAL", self._source, *call)  # type: ignore[no-untyped-call]


class Calls:
    """Runs each call to its end even if its caller is cancelled, so that no connection is left with an unread reply.

    At most `max_running` run at once; the others wait their turn, in order, for as long as those before them get
    answers: a crowd is not an outage. When one before them finds the store out of reach, all that wait are told so.
    """

    def __init__(self, *, max_running: int) -> None:
        self._turns = asyncio.Semaphore(max_running)
        self._num_outages = 0
        self._is_out = False  # what the latest call found
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a call that nobody can cancel but `close`."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a caller that was cancelled does not come back for it

    async def run(self, script: Script, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Runs a script when its turn comes. Raises UnavailableError(STORE_UNAVAILABLE)."""
        with store_errors():
            num_outages = self._num_outages
            async with self._turns:
                if self._is_out and num_outages != self._num_outages:
                    raise TimeoutError("those before it got no answer")
                try:
                    reply = await script.run(client, keys, arguments)
                except _UNREACHABLE:
                    self._num_outages += 1
                    self._is_out = True
                    raise
                self._is_out = False
                return reply

    async def close(self) -> None:
        """Waits for the calls that are under way; each is bounded by the client's timeouts."""
        while self._tasks:
            await asyncio.wait(self._tasks)
