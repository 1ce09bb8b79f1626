"""What a call leaves behind: nothing that waits for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from common.errors import SlowConsumerError
from common.rpc.stream_writer import StreamWriter
from gateway.answer import Answer
from gateway.handler import _tap
from gateway.lifecycle import failed
from gateway.live import LiveRequest
from gateway.rpc.outlet import StreamOutlet
from protos.inference.v1 import inference_pb2
from tests.unit.gateway.fakes import live_request


class Context:
    """Of a client that reads when told to, or is gone by then."""

    def __init__(self, *, is_gone: bool) -> None:
        self.written: list[inference_pb2.GenerateResponse] = []
        self.reads: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_gone = is_gone

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        await self.reads
        if self._is_gone:
            raise ConnectionError
        self.written.append(message)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def answered(context: Context, live: LiveRequest) -> None:
    """A call whose last write is still under way when it ends."""
    with StreamWriter(context, 60.0) as writer:
        outlet = StreamOutlet(writer, SlowConsumerError("nothing was read"))
        tap = _tap(live, Answer(live), outlet)
        taking = asyncio.create_task(live.mailbox.take(tap))
        await asyncio.sleep(0)
        live.mailbox.put_tokens(list(b"one"), [], None)
        assert not outlet.is_free
        live.end(failed(SlowConsumerError("nothing was read")))
        await taking


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_call_and_its_request_are_free_when_it_ends(is_gone: bool, without_collector: None) -> None:
    context, live = Context(is_gone=is_gone), live_request()
    left = [weakref.ref(context), weakref.ref(live.mailbox)]
    reads = context.reads
    await answered(context, live)
    del context, live
    reads.set_result(None)
    for _ in range(3):
        await asyncio.sleep(0)
    del reads
    assert [it() for it in left] == [None, None]


async def test_one_that_fails_in_its_task_leaves_nothing_either(without_collector: None) -> None:
    async def call(context: Context) -> None:
        with StreamWriter(context, 60.0) as writer:
            writer.begin(inference_pb2.GenerateResponse())
            context.reads.set_result(None)
            await writer.write(inference_pb2.GenerateResponse())

    context = Context(is_gone=True)
    left = weakref.ref(context)
    with pytest.raises(ConnectionError) as caught:
        await call(context)
    del context, caught
    assert left() is None
