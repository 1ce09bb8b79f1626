"""What surrounds every call of both programs: decoding, errors to status, one log line; and bearer authentication."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from common.clock import Clock
from common.errors import InternalError, InvalidRequestError, TidegateError, UnauthenticatedError
from common.rpc.status import budget_metadata, to_rich_status
from common.types import Reason

_log = structlog.get_logger(__name__)

IDENTITY: ContextVar[Any] = ContextVar("identity")
"""Who calls, as the call's authenticator said; set in the task that runs the handler."""

Authenticator = Callable[[str | None], Any]
"""Turns a bearer token (None: none was sent) into an identity, or raises UnauthenticatedError."""

Handler = Any  # grpc.RpcMethodHandler: the stubs know only its synchronous form


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a message that could not be decoded, until somebody can be told."""

    error: InvalidRequestError


def _guard_decoder(decode: Callable[[bytes], Any] | None, max_bytes: int) -> Callable[[bytes], Any] | None:
    # An exception in a deserializer reaches the client as UNKNOWN, with no chance to say more.
    if decode is None:
        return None

    def guarded(raw: bytes) -> Any:
        if len(raw) > max_bytes:
            return _Malformed(InvalidRequestError(f"the message has {len(raw)} bytes; at most {max_bytes} are allowed"))
        try:
            return decode(raw)
        except (DecodeError, UnicodeDecodeError, ValueError):
            what = "the bytes are not a valid message of this method (strings must be valid UTF-8)"
            return _Malformed(InvalidRequestError(what, reason=Reason.MALFORMED_MESSAGE))

    return guarded


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise request.error
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


class Surroundings:
    """Outermost: gives every handler decoded requests and every caller a proper status, and logs each call once.

    Handlers raise TidegateError; nothing else of an exception reaches a client. Response streams are closed in the task
    of the call, so that a handler's `finally` runs as soon as the client is gone. No interceptor of the library: these
    build every call's handler anew, which costs more than all that is done here.
    """

    def __init__(
        self, clock: Clock, max_message_bytes: int, authenticators: Mapping[str, Authenticator] | None = None
    ) -> None:
        """`max_message_bytes`: of the largest message that a handler gets; `authenticators` by full service name, e.g.
        `inference.v1.Inference`: services without one are open to all."""
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._authenticators = dict(authenticators or {})
        self._wrapped: dict[str, tuple[Handler, Authenticator | None]] = {}  # by method

    def find(self, service: grpc.GenericRpcHandler, details: grpc.HandlerCallDetails) -> Handler:
        """What is to serve a call of a service's; None if it has no such method. Called in the task of the call, where
        it sets IDENTITY; who is not known gets a handler that refuses."""
        method = str(details.method)
        known = self._wrapped.get(method)
        if known is None:
            handler = service.service(details)
            if handler is None:
                return None
            name = method.rpartition("/")[0].lstrip("/")
            known = self._wrapped[method] = self._wrap(method, handler), self._authenticators.get(name)
        handler, authenticate = known
        if authenticate is not None:
            try:
                IDENTITY.set(authenticate(_bearer_token(details)))
            except TidegateError as error:
                return self._wrap(method, _refusing(service.service(details), error))
        return handler

    def _wrap(self, method: str, handler: Handler) -> Handler:
        decode = _guard_decoder(handler.request_deserializer, self._max_message_bytes)
        encode = handler.response_serializer
        prepare = _checked_stream if handler.request_streaming else _checked
        if handler.response_streaming:
            streaming = self._around(method, _streaming_behavior(handler), prepare)
            build = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return build(streaming, decode, encode)
        unary = self._around(method, handler.stream_unary or handler.unary_unary, prepare)
        build = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return build(unary, decode, encode)

    def _around(self, method: str, behavior: Any, prepare: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            return await self._observed(method, context, lambda: behavior(prepare(request), context))

        return call

    async def _observed(self, method: str, context: Any, run: Callable[[], Awaitable[Any]]) -> Any:
        structlog.contextvars.bind_contextvars(method=method)  # for this call alone: it has a task of its own
        started = self._clock.monotonic()
        status = "OK"
        try:
            return await run()
        except TidegateError as error:
            status = error.status
            await _abort(context, error)
        except grpc.aio.AbortError:
            status = "ABORTED_BY_HANDLER"
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"
            if _is_cancelled_from_outside():
                raise
            # Left alone, a cancellation from within leaves the client without any answer.
            status = "INTERNAL"
            _log.exception("rpc_cancelled_within")
            await _abort(context, _internal_error())
        except Exception:  # noqa: BLE001 - the outermost edge: logged in full, told to the client as INTERNAL only
            status = "INTERNAL"
            _log.exception("rpc_failed")
            await _abort(context, _internal_error())
        finally:
            _log.debug("rpc", status=status, duration_s=round(self._clock.monotonic() - started, 6))


async def _abort(context: Any, error: TidegateError) -> None:
    status = rpc_status.to_status(to_rich_status(error))
    metadata = (*status.trailing_metadata, *budget_metadata(error.budget))
    await context.abort_with_status(status._replace(trailing_metadata=metadata))


def _internal_error() -> InternalError:
    return InternalError("internal error; the server's log has the cause")


def _is_cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _streaming_behavior(handler: Handler) -> Callable[[Any, Any], Awaitable[None]]:
    behavior = handler.stream_stream or handler.unary_stream
    if not inspect.isasyncgenfunction(behavior):
        return behavior  # type: ignore[no-any-return]  # writes by itself through the context

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(behavior(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


class Registry:
    """What generated code is given to register a service at, in place of the server: every call passes `Surroundings`.

    Methods are registered by the name of their service alone. For each that is registered by its own name, too, the
    library would keep a request open, and look at all of these with every call.
    """

    def __init__(self, server: grpc.aio.Server, surroundings: Surroundings) -> None:
        self._server = server
        self._surroundings = surroundings

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Called by generated code."""
        self._server.add_generic_rpc_handlers([_Surrounded(it, self._surroundings) for it in handlers])

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Called by generated code, with what it has registered already."""


class _Surrounded(grpc.GenericRpcHandler):
    def __init__(self, service: grpc.GenericRpcHandler, surroundings: Surroundings) -> None:
        self._service = service
        self._surroundings = surroundings

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        return self._surroundings.find(self._service, handler_call_details)


def _bearer_token(details: grpc.HandlerCallDetails) -> str | None:
    """The token of `authorization: Bearer <token>`; None if the header is missing.

    Raises UnauthenticatedError for another scheme, an empty token or several headers.
    """
    values = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("authorization: exactly one header of the form 'Bearer <key>' is allowed")
    return token.strip()


def _refusing(handler: Handler, error: TidegateError) -> Handler:
    async def refuse(request: Any, context: Any) -> None:
        raise error

    decode, encode = handler.request_deserializer, handler.response_serializer
    if handler.response_streaming:
        build = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
    else:
        build = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
    return build(refuse, decode, encode)
