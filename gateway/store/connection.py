"""The connection to Redis: named scripts, many callers, one translation of errors, calls that survive cancelling."""

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

from gateway.store.patience import Patience
from gateway.store.wire import Argument as Argument
from gateway.store.wire import Call, Wire, is_out_of_order, pack_parts, unavailable

T = TypeVar("T")
_CLOSED = "the handler is closed"  # uvloop, of a connection whose loss it has noticed and not told yet
_UNREACHABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    TimeoutError,
    OSError,
)


def connect(url: str, *, max_connections: int, timeout_s: float, block_s: float = 0.0) -> Redis:
    """A client for what is no script, and waits in the server. It sends every command once.

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
        raise unavailable(error) from error
    except exceptions.ResponseError as error:
        if not is_out_of_order(error):
            raise
        raise unavailable(error) from error
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise unavailable(error) from error


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
        self._keys: Sequence[str] = ()
        self._head = b""  # of a call with these keys

    def __repr__(self) -> str:
        return f"Script({self._name})"

    def pack(self, keys: Sequence[str], arguments: Sequence[Argument]) -> bytes:
        """A call as it is sent. What it begins with is packed once as long as `keys` are the same object."""
        if keys is not self._keys or not self._head:
            self._keys, self._head = keys, pack_parts(("EVALSHA", self.digest, len(keys), *keys))
        return b"*%d\r\n%b%b" % (3 + len(keys) + len(arguments), self._head, pack_parts(arguments))


class Trunk:
    """The connection that links share: what all of them send in one turn of the loop is written together.

    Made without I/O; belongs to one event loop. It connects with the first call, and anew with the first one after the
    connection broke; what was sent until then is told so and not sent again.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """`timeout_s`: for connecting, and for each reply. Raises ValueError if the URL makes no sense."""
        self.url = url
        self.num_links = 0
        self._timeout_s = timeout_s
        self._scripts: dict[str, str] = {}  # by digest
        self._pool = _pool(url, 1, timeout_s, None)
        self._wire: Wire | None = None
        self._patience = Patience()

    async def is_answered(self, step: asyncio.Future[Any], patience_s: float) -> bool:
        """Waits for calls to end; False once the store has been silent for so long, towards everybody who waits."""
        return await self._patience.is_answered(step, patience_s)

    def wire(self) -> Wire:
        """The connection, a new one if the last is over."""
        if self._wire is None or self._wire.is_over:
            address = self._pool.make_connection()  # type: ignore[no-untyped-call]
            self._wire = Wire(address, self._timeout_s, self._patience.heard, list(self._scripts.values()))
        return self._wire

    def know(self, script: Script) -> None:
        """Loads a script with each connection from the next one on."""
        self._scripts[script.digest] = script.source

    async def leave(self) -> None:
        """A link closes; with the last one, and after its replies, the connection ends."""
        self.num_links -= 1
        if self.num_links == 0 and self._wire is not None:
            await self._wire.close()


class Link:
    """Runs a store's scripts. A call that was sent runs to its end even if its caller is cancelled."""

    def __init__(self, store: str | Trunk, *, timeout_s: float) -> None:
        """`store`: its URL, or a connection that others use too; `timeout_s` is that of a connection of its own."""
        self._trunk = Trunk(store, timeout_s=timeout_s) if isinstance(store, str) else store
        self._trunk.num_links += 1
        self._steps: set[asyncio.Task[Any]] = set()

    def script(self, name: str, preludes: Sequence[str], read: Callable[[str], str] = read_script) -> Script:
        """A script that the server is told when it is connected to, so that calls run in the order of their sending.

        One that the server forgets meanwhile is sent once more, behind what was sent after it. Who needs an order all
        the same waits for answers, or looks at them.
        """
        script = Script(name, preludes, read)
        self._trunk.know(script)
        return script

    def send(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        *,
        at_once: bool = False,
        read: Callable[[Any], Any] | None = None,
    ) -> asyncio.Future[Any]:
        """Sends a script. The reply fails with UnavailableError(STORE_UNAVAILABLE) if the store is out of reach.

        `at_once`: it and what was sent before are written now, unless many calls are under way. `read` makes the reply
        of what the server says.
        """
        reply = asyncio.get_running_loop().create_future()
        call = Call(script.source, keys, arguments, reply, read)
        self._trunk.wire().send(script.pack(keys, arguments), call, at_once=at_once)
        return reply

    def flush(self) -> None:
        """Writes what was sent."""
        self._trunk.wire().flush()

    async def is_answered(self, step: asyncio.Future[Any], patience_s: float) -> bool:
        """Waits for calls to end; False once the store has been silent for so long, towards everybody who waits."""
        return await self._trunk.is_answered(step, patience_s)

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
        """Waits for what was started, and ends the connection if nobody else uses it."""
        await self.finish_steps()
        await self._trunk.leave()
