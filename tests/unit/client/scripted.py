"""A gateway that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from client import Client
from common.errors import TidegateError
from common.rpc.status import to_rich_status
from protos.inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2

Step = Message | TidegateError | asyncio.Event
"""A message to send, an error to end with, or an event to wait for."""


def accepted(request_id: str = "r1") -> Message:
    return inference_pb2.GenerateResponse(
        accepted=inference_pb2.Accepted(request_id=request_id, model="m", prompt_tokens=3, seed=2**64 - 1)
    )


def delta(text: str, offset: int = 0) -> Message:
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, offset=offset))


def finished(reason: int = types_pb2.FINISH_REASON_STOP) -> Message:
    return inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(
            reason=types_pb2.FinishReason.ValueType(reason),
            usage=types_pb2.Usage(prompt_tokens=3, cached_prompt_tokens=1, completion_tokens=2),
            timing=inference_pb2.Timing(queue_s=0.5, ttft_s=1.0, total_s=2.0),
        )
    )


class ScriptedGateway(inference_pb2_grpc.InferenceServicer):
    """Plays one script for each call, in order; remembers requests and metadata."""

    def __init__(self, *scripts: list[Step]) -> None:
        self.scripts = list(scripts)
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.has_ended = asyncio.Event()  # a call; one that waits for ever ends only when it is cancelled
        self.was_cancelled = False

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self._play(request, context):
            yield message

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in self._play(request, context):
            yield message

    async def _one(self, request: Any, context: Any) -> Any:
        return await anext(self._play(request, context))

    Complete = Cancel = CountTokens = ListModels = _one

    async def _play(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        context.add_done_callback(lambda _: self.has_ended.set())
        self.metadata.append(dict(context.invocation_metadata()))
        for step in self.scripts.pop(0):
            if isinstance(step, TidegateError):
                await context.abort_with_status(rpc_status.to_status(to_rich_status(step)))
            elif isinstance(step, asyncio.Event):
                try:
                    await step.wait()
                except asyncio.CancelledError:
                    self.was_cancelled = True
                    raise
            else:
                yield step


@asynccontextmanager
async def serving(gateway: ScriptedGateway, *, register: Callable[[Any], None] | None = None) -> AsyncIterator[str]:
    """The address of `gateway`."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    if register is not None:
        register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def connected(
    gateway: ScriptedGateway, make: Callable[[str], Client] = Client, *, register: Callable[[Any], None] | None = None
) -> AsyncIterator[Client]:
    """A client of `gateway` over a real connection."""
    async with serving(gateway, register=register) as address, make(address) as client:
        yield client


class BreakableLink:
    """A way to an address over which everything comes through, until `cut` closes its connections."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """The address to connect to."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        """Both ends are told."""
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, target_writer]
        await asyncio.gather(_copy(reader, target_writer), _copy(target_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # cut
        while block := await reader.read(65536):
            writer.write(block)
            await writer.drain()
    writer.close()
