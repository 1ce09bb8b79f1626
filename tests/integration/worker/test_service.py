from __future__ import annotations

import grpc
import pytest

from protos.inference.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.worker.rig import WAIT_S, Gateway, WorkerRig

KEY = (("authorization", "Bearer secret"),)


async def describe(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> worker_pb2.Description:
    call = worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), metadata=metadata, timeout=WAIT_S)
    return worker_pb2.Description.FromString(b"".join([answer.chunk async for answer in call]))


async def test_a_tokenizer_larger_than_any_message_is_described() -> None:
    tokenizer = bytes(range(256)) * (24 * 1024)  # 6 MiB
    async with (
        WorkerRig(tokenizer=tokenizer).running() as rig,
        grpc.aio.insecure_channel(rig.address) as channel,
    ):
        description = await describe(channel)
        assert description.tokenizer_json == tokenizer
        assert description.limits.model == "fake"


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)])
async def test_without_the_fleet_key_nothing_is_told(metadata: tuple[tuple[str, str], ...]) -> None:
    async with WorkerRig(fleet_key="secret").running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(channel, metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await Gateway(channel, metadata).call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert rig.num_sessions == 0


async def test_with_the_fleet_key_everything_is_open() -> None:
    async with WorkerRig(fleet_key="secret").running() as rig, grpc.aio.insecure_channel(rig.address) as channel:
        assert (await describe(channel, KEY)).limits.model == "fake"
        assert (await Gateway(channel, KEY).open()).worker_id == "w1"


async def test_while_loading_calls_are_unavailable() -> None:
    async with WorkerRig().running(is_loaded=False) as rig, grpc.aio.insecure_channel(rig.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await describe(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await Gateway(channel).call.code() is grpc.StatusCode.UNAVAILABLE
