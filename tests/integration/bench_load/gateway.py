"""A gateway on a real socket that answers every request in steps of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from common.errors import LimitExceededError, TidegateError, UnavailableError
from common.rpc.status import to_rich_status
from common.types import Reason
from protos.inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2

REFUSED = LimitExceededError("the queue is full", reason=Reason.QUEUE_FULL)
LOST = UnavailableError("the worker vanished", reason=Reason.WORKER_LOST)


class StandInGateway(inference_pb2_grpc.InferenceServicer):
    """Gives each request its tokens one by one, each after `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[Any] = []
        self.keys: list[str] = []
        self.arrived = asyncio.Condition()
        self.errors: dict[int, TidegateError] = {}  # by number of the request
        self.held_from: int | None = None  # the first request that is never answered
        self.num_live = 0
        self.is_idle = asyncio.Event()

    async def ListModels(self, request: Any, context: Any) -> Any:
        model = inference_pb2.Model(name="stand-in", context_length=1000, vocab_size=5000, num_workers=1)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        number = len(self.requests)
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata())["authorization"])
        async with self.arrived:
            self.arrived.notify_all()
        self.num_live += 1
        self.is_idle.clear()
        try:
            yield inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(request_id="r", model="stand-in"))
            await (asyncio.Event() if self._is_held(number) else self.gate).wait()
            if (error := self.errors.get(number)) is not None:
                await context.abort_with_status(rpc_status.to_status(to_rich_status(error)))
            num_output = request.sampling.max_tokens
            for token in range(num_output):
                await self.gate.wait()
                yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x", token_ids=[token]))
            yield inference_pb2.GenerateResponse(
                finished=inference_pb2.Finished(
                    reason=types_pb2.FINISH_REASON_LENGTH,
                    usage=types_pb2.Usage(
                        prompt_tokens=len(request.tokens.token_ids),
                        completion_tokens=num_output,
                        cached_prompt_tokens=1,
                    ),
                    timing=inference_pb2.Timing(queue_s=0.0),
                )
            )
        finally:
            self.num_live -= 1
            if not self.num_live:
                self.is_idle.set()

    def _is_held(self, number: int) -> bool:
        return self.held_from is not None and number >= self.held_from

    async def until_arrived(self, number: int) -> None:
        """Returns once so many requests have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= number)


@asynccontextmanager
async def serving(gateway: StandInGateway) -> AsyncIterator[str]:
    """The address of a server."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
