"""The gRPC server of both programs: limits, keepalive, health, reflection, graceful stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from common.clock import Clock
from common.rpc.interceptors import Authenticator, Registry, Surroundings

_log = structlog.get_logger(__name__)

HEALTH_SERVICE = health.SERVICE_NAME
_WATCHERS_S = 2.0
_LOOPBACK = frozenset({"127.0.0.1", "[::1]", "localhost", "unix"})


class ListenError(OSError):
    """The address cannot be listened at; the message names it."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server treats connections and messages."""

    max_receive_message_bytes: int
    max_send_message_bytes: int
    min_ping_interval_s: float = 5.0  # pings of clients that are further apart are welcome, with or without calls
    max_connection_age_s: float | None = None  # connections are closed (GOAWAY) about then; None: never
    max_connection_age_grace_s: float = 3600.0  # and calls on them may go on this long
    # Calls that wait for Python to take them. Beyond it the library drops some at random, which a client sees as a bare
    # CANCELLED; its own bound of 1000 is less than a crowd that reconnects. Refusing is the queue's business.
    max_pending_calls: int = 20_000
    max_pending_s: int = 300  # and for no longer; the library's own 30 s are less than a crowd may take that reconnects
    # Each accepts calls by itself, one at a time, which takes the library some turns of the event loop: where these are
    # long, new calls would wait for one another. A client's connection stays with the listener that took it.
    num_listeners: int = 1
    reuse_port: bool = False  # several processes on one port: only if asked for, else they hide each other

    def to_grpc(self) -> list[tuple[str, int]]:
        """Channel arguments of the server."""
        options = [
            # The library refuses without details; up to here `Surroundings` do, and say what is allowed.
            ("grpc.max_receive_message_length", 2 * self.max_receive_message_bytes),
            ("grpc.max_send_message_length", self.max_send_message_bytes),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", round(self.min_ping_interval_s * 1000)),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.server.max_pending_requests", self.max_pending_calls),
            ("grpc.server.max_pending_requests_hard_limit", 2 * self.max_pending_calls),
            ("grpc.server_max_unrequested_time_in_server", self.max_pending_s),
            ("grpc.so_reuseport", int(self.reuse_port or self.num_listeners > 1)),
        ]
        if self.max_connection_age_s is not None:
            # gRPC itself spreads the age by a tenth, so that clients do not come back all at once.
            options.append(("grpc.max_connection_age_ms", round(self.max_connection_age_s * 1000)))
            options.append(("grpc.max_connection_age_grace_ms", round(self.max_connection_age_grace_s * 1000)))
        return options


class RpcServer:
    """One grpc.aio server for each listener, with health (Check and Watch, by service and overall) and reflection.

    Every service is NOT_SERVING until `set_serving` says otherwise.
    """

    def __init__(
        self,
        options: ServerOptions,
        clock: Clock,
        authenticators: Mapping[str, Authenticator] | None = None,
    ) -> None:
        """`authenticators` by full service name; services without one are open."""
        surroundings = Surroundings(clock, options.max_receive_message_bytes, authenticators)
        self._servers = [grpc.aio.server(options=options.to_grpc()) for _ in range(options.num_listeners)]
        self._registries = [Registry(server, surroundings) for server in self._servers]
        self._is_port_shared = options.reuse_port
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []

    def add(self, service_name: str, register: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a service before `start`: its full name, the generated `add_*Servicer_to_server`, the implementation."""
        for registry in self._registries:
            register(servicer, registry)
        self._names.append(service_name)

    async def start(self, listen: str, credentials: grpc.ServerCredentials | None = None) -> int:
        """Listens at host:port, with TLS if there are credentials, and returns the port (port 0 picks a free one).

        Raises ListenError if it is taken.
        """
        names = [*self._names, HEALTH_SERVICE, reflection.SERVICE_NAME]
        describer = reflection.aio.ReflectionServicer(names)
        for registry in self._registries:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, registry)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(describer, registry)
        await self.set_serving(["", *self._names], is_serving=False)
        await self._health.set(HEALTH_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        if listen.startswith("unix:"):  # only ports can be shared
            del self._servers[1:]
        if len(self._servers) > 1 and not self._is_port_shared:
            await _check_free(listen)
        port, address = 0, listen
        for server in self._servers:
            try:
                if credentials is None:
                    port = server.add_insecure_port(address)
                else:
                    port = server.add_secure_port(address, credentials)
            except RuntimeError as error:  # all that the library says
                raise ListenError(f"cannot listen at {listen}") from error
            address = f"{listen.rpartition(':')[0]}:{port}"
        for server in self._servers:
            await server.start()
        if credentials is None and listen.rpartition(":")[0] not in _LOOPBACK:
            _log.warning("listening_in_plain_text", listen=listen)
        return port

    async def set_serving(self, names: Sequence[str], *, is_serving: bool) -> None:
        """Sets the health of services; the empty name is the whole server."""
        answer = health_pb2.HealthCheckResponse
        for name in names:
            await self._tell(self._health.set(name, answer.SERVING if is_serving else answer.NOT_SERVING))

    async def enter_drain(self) -> None:
        """Turns every service NOT_SERVING for good."""
        await self._tell(self._health.enter_graceful_shutdown())

    async def _tell(self, change: Awaitable[None]) -> None:
        # The health service waits for the slowest of its watchers, and anybody can be one.
        try:
            async with asyncio.timeout(_WATCHERS_S):
                await change
        except TimeoutError:
            _log.warning("health_watcher_stuck")

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls (GOAWAY), gives running ones `grace_s` seconds, then cancels them."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await asyncio.gather(*(server.wait_for_termination() for server in self._servers))


async def _check_free(listen: str) -> None:
    """Raises ListenError if another program listens at host:port; listeners that share a port would not notice it."""
    host, _, port = listen.rpartition(":")
    if not int(port):
        return
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is only closing is no obstacle
            one.bind(address)
            one.listen()
    except OSError as error:
        raise ListenError(f"cannot listen at {listen}") from error
