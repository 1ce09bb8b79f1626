"""A client that is cheap enough to share a machine with the gateway it measures: calls and bytes, no events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import grpc

from protos.inference.v1 import inference_pb2

_PATH = "/inference.v1.Inference/"
_DELTA, _FINISHED = 2, 3  # fields of GenerateResponse


class RawClient:
    """A connection to a gateway; an async context manager."""

    def __init__(self, address: str, key: str, prompt: str, number: int) -> None:
        """`number`: makes its connection another one than those of others."""
        # Channels with equal arguments would share one connection.
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.keepalive_timeout_ms", 20_000 + number)])
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_PATH + "Generate")
        self._complete: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(_PATH + "Complete")
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._prompt = prompt
        self.failures: Counter[str] = Counter()  # by what the gateway said

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    def _note(self, error: grpc.aio.AioRpcError) -> None:
        self.failures[f"{error.code().name}: {error.details()}"] += 1

    def _request(self, num_tokens: int) -> bytes:
        request = inference_pb2.GenerateRequest(text=self._prompt)
        request.sampling.max_tokens = num_tokens
        return request.SerializeToString()

    async def stream(self, num_tokens: int, *, timeout_s: float) -> AsyncGenerator[tuple[float, str], None]:
        """The texts of one answer, each with the time of its receipt (monotonic seconds); "" is the end of it, which is
        missing if the gateway fails."""
        call = self._generate(self._request(num_tokens), timeout=timeout_s, metadata=self._metadata)
        try:
            async for raw in call:
                now = time.monotonic()
                event = raw[0] >> 3
                if event == _DELTA:
                    yield now, inference_pb2.GenerateResponse.FromString(raw).delta.text
                elif event == _FINISHED:
                    yield now, ""
        except grpc.aio.AioRpcError as error:
            self._note(error)
            return

    async def complete(self, num_tokens: int, *, timeout_s: float) -> bool:
        """A whole answer, not looked at. False if the gateway fails."""
        try:
            await self._complete(self._request(num_tokens), timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self._note(error)
            return False
        return True

    async def wait_until_served(self) -> None:
        """Returns when the gateway process at the other end of this connection gives answers."""
        while True:
            if await self.complete(4, timeout_s=60):
                return
            await asyncio.sleep(0.1)
