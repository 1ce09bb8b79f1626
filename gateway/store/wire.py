"""One connection to Redis that many callers use at once: what is sent in one turn of the loop is written together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import hiredis
from redis import exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from common.errors import UnavailableError
from common.types import Reason

Argument = str | int
# Errors of the server that say that it, not the call, is at fault.
_OUT_OF_ORDER = (
    *("LOADING", "READONLY", "OOM", "NOAUTH", "WRONGPASS", "MASTERDOWN", "CLUSTERDOWN", "ERR max number"),
    *("MISCONF", "NOREPLICAS", "BUSY "),  # it cannot write to its disk, has too few replicas, runs a script for long
)
_UNKNOWN_SCRIPT = "NOSCRIPT"


_RETRY_AFTER_S = 1.0
_CROWD = 16  # calls without an answer
_NOTHING = object()


def is_out_of_order(error: exceptions.ResponseError) -> bool:
    """Whether it is the server that is at fault."""
    return str(error).startswith(_OUT_OF_ORDER)


def unavailable(cause: BaseException) -> UnavailableError:
    """The store is out of reach, or in no state to answer. What was sent may have been done."""
    message = "the store cannot be reached"
    error = UnavailableError(message, reason=Reason.STORE_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S)
    error.__cause__ = cause
    return error


class Call(NamedTuple):
    """A script that was sent, or is about to be. The reply fails with what `unavailable` makes, or a ResponseError."""

    source: str
    keys: Sequence[str]
    arguments: Sequence[Argument]
    reply: asyncio.Future[Any]
    read: Callable[[Any], Any] | None = None  # makes the reply of what the server has said


def pack_parts(parts: Sequence[Argument]) -> bytes:
    """Parts of a command as they are sent, without the number of them in front."""
    packed = _pack(parts)
    return packed[packed.index(b"\n") + 1 :]


def _pack(command: Sequence[Argument]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # says: one argument
    return packed


def _hand_out(reply: Any, call: Call) -> None:
    try:
        read = reply if call.read is None else call.read(reply)
    except Exception as error:  # noqa: BLE001 - of who asked, who would wait for ever
        call.reply.set_exception(error)
    else:
        call.reply.set_result(read)


class Wire(asyncio.Protocol):
    """A connection from its making to its end. Replies come in the order of the calls, whoever still waits for them.

    It ends when a reply, or the connection itself, is not there within the timeout, which begins anew with every reply:
    a server that answers somebody is not out of reach, however many wait.
    """

    def __init__(
        self,
        address: AbstractConnection,
        timeout_s: float,
        on_heard: Callable[[], None] = lambda: None,
        sources: Sequence[str] = (),
    ) -> None:
        """`address`: a connection that is never opened, which tells where and as whom to connect; `on_heard` is told
        that answers have come; `sources`: scripts that the server is to know before the first call. Begins to connect.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._on_heard = on_heard
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._reader = hiredis.Reader(notEnoughData=_NOTHING, replyError=exceptions.ResponseError)
        self._unsent: list[bytes] = []
        self._calls: deque[Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None  # somebody waits for the last reply
        self._heard_at = self._loop.time()  # last, or when the first of the calls came
        self.is_over = False
        self._greet()
        for source in sources:  # a server that refuses takes them with their calls
            self._order(("SCRIPT", "LOAD", source), lambda done: done.cancelled() or done.exception())
        self._connecting = self._loop.create_task(self._connect())

    def send(self, packed: bytes, call: Call, *, at_once: bool = False) -> None:
        """Sends a command behind all others; its reply is the call's.

        `at_once`: it is written now, with all that waits, and not in the next turn of the loop with what this one adds,
        unless many calls are under way: a crowd goes together, which costs each of them less.
        """
        at_once = at_once and len(self._calls) < _CROWD
        if not self._calls:
            self._heard_at = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout_s, self._look)
        self._calls.append(call)
        if not self._unsent and self._transport is not None and not at_once:
            self._loop.call_soon(self.flush)
        self._unsent.append(packed)
        if at_once:
            self.flush()

    def _greet(self) -> None:
        """What a server has to be told first."""
        address = self._address
        name = () if address.username is None else (address.username,)
        if address.password is not None:
            self._order(("AUTH", *name, address.password), self._obeyed)
        if address.db:
            self._order(("SELECT", address.db), self._obeyed)

    def _order(self, command: tuple[Argument, ...], look: Callable[[asyncio.Future[Any]], object]) -> None:
        done = self._loop.create_future()
        done.add_done_callback(look)
        self.send(_pack(command), Call("", (), (), done))

    def _obeyed(self, done: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._end(error)

    async def _connect(self) -> None:
        address = self._address
        try:
            if isinstance(address, UnixDomainSocketConnection):
                await self._loop.create_unix_connection(lambda: self, address.path)
            elif isinstance(address, Connection):
                tls = address.ssl_context.get() if isinstance(address, SSLConnection) else None
                await self._loop.create_connection(lambda: self, address.host, address.port, ssl=tls)
        except (OSError, exceptions.RedisError) as error:
            self._end(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Writes what has waited for the connection."""
        self._transport = cast(asyncio.WriteTransport, transport)
        if self.is_over:
            self._transport.abort()
        else:
            self.flush()

    def flush(self) -> None:
        """Writes what waits for its turn."""
        if self._transport is None or not self._unsent:
            return
        # One that is closing would raise; that it is lost is told next.
        if not self.is_over and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        """Hands replies to those who wait for them."""
        if self.is_over:
            return
        self._reader.feed(data)
        self._heard_at = self._loop.time()
        try:
            while (reply := self._reader.gets(False)) is not _NOTHING and self._calls:
                self._answer(self._calls.popleft(), reply)
        except hiredis.ProtocolError as error:
            self._end(error)
        self._on_heard()
        if self._drained is not None and not self._drained.done() and not self._calls:
            self._drained.set_result(None)

    def _answer(self, call: Call, reply: Any) -> None:
        if not isinstance(reply, exceptions.ResponseError):
            if not call.reply.done():  # else its caller was cancelled
                _hand_out(reply, call)
            return
        message = str(reply)
        if message.startswith(_UNKNOWN_SCRIPT):  # it has not run: resending it is safe
            self.send(_pack(("EVAL", call.source, len(call.keys), *call.keys, *call.arguments)), call)
        elif not call.reply.done():
            call.reply.set_exception(unavailable(reply) if is_out_of_order(reply) else reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody gets an answer any more."""
        self._end(exc or ConnectionError("the connection was closed"))

    def _look(self) -> None:
        self._timer = None
        if not self._calls:
            return
        left_s = self._heard_at + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._end(TimeoutError("no answer in time"))

    def _end(self, error: BaseException) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._connecting.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        while self._calls:
            reply = self._calls.popleft().reply
            if not reply.done():
                reply.set_exception(unavailable(error))

    async def close(self) -> None:
        """Waits for the replies of what was sent, and ends."""
        if self._calls and not self.is_over:
            self._drained = self._loop.create_future()
            await self._drained
        self._end(ConnectionError("the connection was closed"))
        await asyncio.gather(self._connecting, return_exceptions=True)
