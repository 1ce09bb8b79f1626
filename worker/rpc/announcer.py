"""Tells every configured gateway, again and again, that this worker exists and where."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from random import Random

import grpc
import structlog

from common.rpc.fleet_key import fleet_metadata
from common.rpc.tls import PLAIN_TEXT, Dialling
from protos.inference.v1 import fleet_pb2, fleet_pb2_grpc
from worker.rpc.identity import Identity

_log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 5.0
MIN_RETRY_S = 0.2
MAX_RETRY_S = 3.0


class Announcer:
    """One task per gateway. An announcement lives for the gateway's ttl_s and is renewed after a third of it."""

    def __init__(
        self,
        gateways: Sequence[str],
        identity: Identity,
        *,
        address: str,
        model: str,
        fleet_key: str,
        random: Random,
        dialling: Dialling = PLAIN_TEXT,
    ) -> None:
        """`address` is where gateways dial this worker; without a host (`:port`), each is told the host it sees.

        `random` spreads the tries of workers that all wait for the same gateway.
        """
        self._gateways = gateways
        self._announcement = fleet_pb2.AnnounceRequest(
            worker_id=identity.worker_id, epoch=identity.epoch, address=address, model=model
        )
        self._metadata = fleet_metadata(fleet_key)
        self._random = random
        self._dialling = dialling

    async def run(self) -> None:
        """Announces until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for gateway in self._gateways:
                tasks.create_task(self._announce_to(gateway), name=f"announce to {gateway}")

    async def say_draining(self) -> None:
        """Tells every gateway once, now, that no new requests are taken; one that cannot be reached learns it later."""
        self._announcement.draining = True
        await asyncio.gather(*(self._say_draining_to(gateway) for gateway in self._gateways))

    async def _say_draining_to(self, gateway: str) -> None:
        async with self._channel(gateway) as channel:
            try:
                await self._announce_once(channel, gateway)
            except (grpc.aio.AioRpcError, OSError) as error:
                _log.warning("announce_failed", gateway=gateway, cause=_cause(error))

    async def _announce_to(self, gateway: str) -> None:
        is_known, retry_s = False, MIN_RETRY_S
        async with self._channel(gateway) as channel:
            while True:
                try:
                    ttl_s = await self._announce_once(channel, gateway)
                except (grpc.aio.AioRpcError, OSError) as error:
                    if is_known or retry_s == MIN_RETRY_S:  # once per change, not per try
                        _log.warning("announce_failed", gateway=gateway, cause=_cause(error))
                    is_known, delay_s = False, retry_s * self._random.uniform(0.5, 1.0)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
                else:
                    if not is_known:
                        _log.info("announced", gateway=gateway, ttl_s=ttl_s)
                    is_known, delay_s, retry_s = True, ttl_s / 3, MIN_RETRY_S
                await asyncio.sleep(delay_s)

    async def _announce_once(self, channel: grpc.aio.Channel, gateway: str) -> float:
        request = fleet_pb2.AnnounceRequest()
        request.CopyFrom(self._announcement)
        host, _, port = request.address.rpartition(":")
        if not host:
            request.address = f"{await local_host_towards(gateway)}:{port}"
        stub = fleet_pb2_grpc.FleetStub(channel)
        answer: fleet_pb2.AnnounceResponse = await stub.Announce(
            request, metadata=self._metadata, timeout=CALL_TIMEOUT_S
        )
        return answer.ttl_s

    def _channel(self, gateway: str) -> grpc.aio.Channel:
        # A gateway that is not up yet is tried again soon, not after gRPC's usual minutes.
        options = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 3000)]
        return self._dialling.channel(gateway, options)


def _cause(error: grpc.aio.AioRpcError | OSError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)


async def local_host_towards(address: str) -> str:
    """This host's own address on the interface that leads to `host:port`. Nothing is sent but a look-up of the name.

    Raises OSError if the name is not known.
    """
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        own: str = probe.getsockname()[0]
    return f"[{own}]" if ":" in own else own
