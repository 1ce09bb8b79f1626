from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc

from protos.inference.v1 import fleet_pb2, fleet_pb2_grpc
from worker.rpc.announcer import Announcer
from worker.rpc.identity import Identity

WAIT_S = 120.0


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """Remembers what it is told; announcements live for 0.3 s."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[fleet_pb2.AnnounceRequest, Any]] = asyncio.Queue()

    async def Announce(self, request: fleet_pb2.AnnounceRequest, context: Any) -> fleet_pb2.AnnounceResponse:
        await self.told.put((request, dict(context.invocation_metadata()).get("authorization")))
        return fleet_pb2.AnnounceResponse(ttl_s=0.3)

    async def next(self) -> tuple[fleet_pb2.AnnounceRequest, Any]:
        return await asyncio.wait_for(self.told.get(), WAIT_S)


@asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[FakeFleet, str]]:
    server = grpc.aio.server()
    fleet = FakeFleet()
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    port = server.add_insecure_port(listen)
    await server.start()
    try:
        yield fleet, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def announcer(*gateways: str, address: str = "10.0.0.7:1234") -> Announcer:
    identity = Identity("w1", 17)
    return Announcer(gateways, identity, address=address, model="m", fleet_key="secret", random=Random(1))


async def test_every_gateway_is_told_again_and_again() -> None:
    async with serving() as (first, first_address), serving() as (second, second_address):
        running = asyncio.create_task(announcer(first_address, second_address).run())
        for fleet in (first, second, first, second):
            request, key = await fleet.next()
            assert (request.worker_id, request.epoch, request.model, request.draining) == ("w1", 17, "m", False)
            assert (request.address, key) == ("10.0.0.7:1234", "Bearer secret")
        running.cancel()


async def test_one_gateway_that_is_away_does_not_keep_the_others_from_hearing() -> None:
    async with serving() as (_, gone):
        pass
    async with serving() as (fleet, address):
        running = asyncio.create_task(announcer(gone, "name.invalid:1", address).run())
        await fleet.next()
        await fleet.next()
        async with serving(gone) as (late, _):
            await late.next()
        running.cancel()


async def test_without_a_host_the_address_is_the_one_that_leads_to_the_gateway() -> None:
    async with serving() as (fleet, address):
        running = asyncio.create_task(announcer(address, address=":1234").run())
        request, _ = await fleet.next()
        assert request.address == "127.0.0.1:1234"
        running.cancel()


async def test_draining_is_said_at_once_and_tells_who_can_be_reached() -> None:
    async with serving() as (fleet, address):
        await announcer("127.0.0.1:1", address).say_draining()
        request, _ = await fleet.next()
        assert request.draining
