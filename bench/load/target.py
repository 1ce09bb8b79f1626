"""The gateway under load, seen through the Python client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from types import TracebackType
from typing import Self

from bench.load.record import LoadRequest
from bench.load.tenants import Sender
from client import Client, ClientError, ClientOptions, Event, Model, Sampling, Tokens

NO_RETRIES = ClientOptions(max_retries=0)
"""A refusal is a result here, not something to get over."""


class Gateway:
    """Sends requests, each under its tenant's key; an async context manager that closes the connections."""

    def __init__(
        self, address: str, senders: Iterable[Sender], *, model: str = "", temperature: float = 0.0, timeout_s: float
    ) -> None:
        """`timeout_s` bounds each answer. Raises ValueError if a key cannot be sent."""
        self._clients = {sender.api_key: Client(address, sender.api_key, options=NO_RETRIES) for sender in senders}
        self._model = model
        self._temperature = temperature
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            await client.close()

    async def describe(self) -> Model:
        """The model under load. Raises ClientError, NOT_FOUND if there is no such model."""
        models = await next(iter(self._clients.values())).list_models(timeout_s=self._timeout_s)
        found = [model for model in models if self._model in ("", model.name)]
        if not found:
            names = ", ".join(model.name for model in models) or "none"
            raise ClientError("NOT_FOUND", f"no model {self._model!r}; there are: {names}")
        return found[0]

    def send(self, request: LoadRequest) -> AsyncGenerator[Event, None]:
        """The answer as it comes: exactly `num_output` tokens, with ids so that each delivery can be counted."""
        sampling = Sampling(temperature=self._temperature, max_tokens=request.num_output, ignore_eos=True)
        return self._clients[request.origin.sender.api_key].generate(
            Tokens(request.prompt),
            sampling,
            model=self._model,
            band=request.origin.band,
            return_token_ids=True,
            timeout_s=self._timeout_s,
        )
