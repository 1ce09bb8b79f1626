"""Tenants that operators set while gateways run: on all of them, and before the file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from client import ClientError
from client.admin import AdminClient
from common.local_redis import LocalRedis
from gateway.tenants import hash_key
from protos.inference.v1 import admin_pb2, types_pb2
from tests.integration.admin.test_admin import ADMIN_KEY, admin_of
from tests.integration.gateway.rig import Client, Rig, reason_of

QUICK = {"max_tokens": 1}


def wish(tenant_id: str = "acme", **fields: Any) -> admin_pb2.SetTenantRequest:
    return admin_pb2.SetTenantRequest(tenant_id=tenant_id, **fields)


async def until(happens: Callable[[], Awaitable[bool]]) -> None:
    """Until something is so at last."""
    async with asyncio.timeout(60):
        while not await happens():  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.05)


async def ends_with(client: Client, reason: str) -> bool:
    error = (await client.ask(sampling=QUICK)).error
    return (reason_of(error) if error is not None else "") == reason


async def test_a_limit_that_is_set_counts_on_every_gateway_and_shows_what_is_left(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker, admin_key=ADMIN_KEY)
    _, other = await rig.serving(worker)
    async with admin_of(app) as admin:
        with structlog.testing.capture_logs() as logs:
            answer = await admin.set_tenant(wish(weight=7, limits={"requests_per_minute": "2", "max_output": "9"}))
        (audit,) = [log for log in logs if log["event"] == "tenant_set"]
        assert (audit["tenant"], audit["former"]["weight"], audit["now"]["weight"]) == ("acme", 1, 7)
        assert audit["now"]["limits"]["requests_per_minute"] == 2
        assert audit["by"]
        tenant = answer.tenant
        assert (tenant.weight, tenant.max_band, tenant.source) == (7, types_pb2.BAND_NORMAL, "set")
        assert dict(tenant.limits) == {"requests_per_minute": "2", "max_output": "9"}
        assert dict(tenant.remaining) == {"requests-per-minute": "2"}
        assert await ends_with(client, "")
        await until(lambda: ends_with(other, "REQUEST_RATE"))
        assert await ends_with(client, "REQUEST_RATE")
        listed = {it.tenant_id: it for it in (await admin.list_tenants()).tenants}
        assert dict(listed["acme"].remaining) == {"requests-per-minute": "0"}
        assert listed["paid"].source == "file"
        answer = await admin.set_tenant(wish(limits={"requests_per_minute": ""}))
        assert (answer.tenant.weight, dict(answer.tenant.limits)) == (7, {"max_output": "9"})
        assert await ends_with(client, "")
        await until(lambda: ends_with(other, ""))
        await admin.reset_tenant("acme")
        status = (await admin.list_tenants()).tenants[0]
        assert (status.weight, status.source, dict(status.limits)) == (1, "file", {})


async def test_tenants_come_go_and_change_their_keys(rig: Rig) -> None:
    worker = await rig.worker()
    app, acme = await rig.serving(worker, admin_key=ADMIN_KEY)
    bolt, renewed = await rig.client(app, "key-bolt"), await rig.client(app, "key-acme-2")
    async with admin_of(app) as admin:
        assert await ends_with(bolt, "UNKNOWN_CREDENTIAL")
        await admin.set_tenant(wish("bolt", max_band=types_pb2.BAND_LOW, key_sha256=[hash_key("key-bolt")]))
        assert await ends_with(bolt, "")
        await admin.set_tenant(wish("bolt", weight=2))
        assert await ends_with(bolt, ""), "its key stays"
        await admin.set_tenant(wish("acme", key_sha256=[hash_key("key-acme-2")]))
        assert await ends_with(acme, "UNKNOWN_CREDENTIAL")
        assert await ends_with(renewed, "")
        await admin.delete_tenant("acme")
        assert await ends_with(renewed, "UNKNOWN_CREDENTIAL")
        await admin.reset_tenant("acme")
        assert await ends_with(acme, "")
        assert "acme" in [it.tenant_id for it in (await admin.list_tenants()).tenants]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (wish("new"), "is new"),
        (wish("New", max_band=1, key_sha256=["0" * 64]), "id must match"),
        (wish(weight=1001), "weight"),
        (wish(max_band=9), "band must be"),
        (wish(limits={"rpm": "1"}), "rpm"),
        (wish(limits={"requests_per_minute": "many"}), "requests_per_minute"),
        (wish(limits={"requests_per_minute": "-1"}), "requests_per_minute"),
        (wish(limits={"time_zone": "Mars"}), "time_zone"),
        (wish(key_sha256=["x"]), "64 hexadecimal"),
        (wish(key_sha256=[hash_key("key-paid")]), "another tenant"),
    ],
)
async def test_what_no_tenant_can_be_is_refused(rig: Rig, request_: admin_pb2.SetTenantRequest, says: str) -> None:
    app = await rig.gateway(admin_key=ADMIN_KEY)
    async with admin_of(app) as admin:
        with pytest.raises(ClientError) as caught:
            await admin.set_tenant(request_)
        assert caught.value.status == "INVALID_ARGUMENT"
        assert says in caught.value.message
        assert {it.source for it in (await admin.list_tenants()).tenants} == {"file"}


@pytest.mark.parametrize("call", [AdminClient.delete_tenant, AdminClient.reset_tenant])
async def test_who_is_not_there_cannot_be_removed(
    rig: Rig, call: Callable[[AdminClient, str], Awaitable[object]]
) -> None:
    app = await rig.gateway(admin_key=ADMIN_KEY)
    async with admin_of(app) as admin:
        with pytest.raises(ClientError) as caught:
            await call(admin, "nobody")
        assert caught.value.status == "NOT_FOUND"


async def test_a_store_that_comes_back_empty_is_told_what_was_set(rig: Rig, tmp_path: Path) -> None:
    redis = LocalRedis(tmp_path)
    redis.start()
    try:
        app = await rig.gateway(redis_url=redis.url, admin_key=ADMIN_KEY)
        async with admin_of(app) as admin:
            await admin.set_tenant(wish(weight=5))
            redis.stop()
            redis.start()
            later = await rig.gateway(redis_url=redis.url, admin_key=ADMIN_KEY)
            async with admin_of(later) as other:

                async def is_known() -> bool:
                    return (await other.list_tenants()).tenants[0].weight == 5

                await until(is_known)
    finally:
        redis.stop()
