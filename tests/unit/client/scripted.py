"""A gateway that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
                await step.wait()
            else:
                yield step


@asynccontextmanager
async def connected(
    gateway: ScriptedGateway, make: Callable[[str], Client] = Client, *, register: Callable[[Any], None] | None = None
) -> AsyncIterator[Client]:
    """A client of `gateway` over a real connection."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    if register is not None:
        register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with make(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop(None)
