"""What clients call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from common.clock import Clock
from common.errors import InvalidRequestError, SlowConsumerError
from common.rpc.interceptors import IDENTITY
from common.rpc.status import budget_metadata
from common.rpc.stream_writer import StreamWriter
from gateway.answer import Accepted, Event, Finished, Outlet, TextDelta
from gateway.dispatcher import Dispatcher
from gateway.handler import Handler
from gateway.live import fleet_request_id
from gateway.placement.fleet import Fleet
from gateway.prompts import PromptReader
from gateway.requests import TokenPrompt, check_prompt, check_request_id
from gateway.rpc.codec import decode_generate, decode_prompt, encode_complete, encode_event
from gateway.rpc.endings import Endings, WatchedCall
from gateway.rpc.outlet import StreamOutlet
from gateway.tenants import Tenant
from protos.inference.v1 import inference_pb2, inference_pb2_grpc

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
register = inference_pb2_grpc.add_InferenceServicer_to_server


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Translates; the handler does the work."""

    def __init__(
        self,
        handler: Handler,
        dispatcher: Dispatcher,
        fleet: Fleet,
        prompts: PromptReader,
        endings: Endings,
        clock: Clock,
        *,
        slow_consumer_s: float,
    ) -> None:
        """`slow_consumer_s`: seconds that one write may wait for its reader."""
        self._handler = handler
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._prompts = prompts
        self._endings = endings
        self._clock = clock
        self._slow_consumer_s = slow_consumer_s

    async def Generate(  # type: ignore[override]  # writes through the context: a slow reader is noticed there
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        """Streams one answer."""
        watched = _watched(request, self._deadline(context))
        with self._endings.noted(watched):
            await self._write(lambda outlet: self._events(request, context, outlet), watched, context)

    async def Resume(  # type: ignore[override]  # as Generate
        self, request: inference_pb2.ResumeRequest, context: Any
    ) -> None:
        """Streams the rest of a resumable answer."""
        tenant = _tenant()
        if not request.request_id:
            raise InvalidRequestError.of_field("request_id", "is empty; it is the one in Accepted")
        fleet_id = fleet_request_id(tenant.tenant_id, request.request_id)
        watched = WatchedCall(tenant.tenant_id, fleet_id, self._deadline(context))
        with self._endings.noted(watched):
            deadline = self._deadline(context)
            await self._write(
                lambda outlet: self._handler.resume(tenant, request.request_id, request.offset, deadline, outlet),
                watched,
                context,
            )

    async def _write(
        self, begin: Callable[[Outlet], AsyncGenerator[Event, None]], watched: WatchedCall, context: Any
    ) -> None:
        too_slow = SlowConsumerError(f"nothing was read for {self._slow_consumer_s:g} s")
        with StreamWriter(context, self._slow_consumer_s) as writer:
            outlet = StreamOutlet(writer, too_slow)
            async with aclosing(begin(outlet)) as events:
                async for event in events:
                    if isinstance(event, Accepted):
                        watched.fleet_id = event.request.fleet_id
                        context.set_trailing_metadata(budget_metadata(event.remaining.by_name()))
                        outlet.token_bytes = event.request.model.text.token_bytes
                    try:
                        await writer.write(encode_event(event, outlet.token_bytes))
                    except TimeoutError:
                        await events.athrow(too_slow)

    async def Complete(self, request: inference_pb2.GenerateRequest, context: Any) -> inference_pb2.CompleteResponse:
        """The same as Generate, in one message."""
        accepted: Accepted | None = None
        finished: Finished | None = None
        deltas: list[TextDelta] = []
        watched = _watched(request, self._deadline(context))
        with self._endings.noted(watched):
            async with aclosing(self._events(request, context)) as events:
                async for event in events:
                    match event:
                        case Accepted():
                            watched.fleet_id = event.request.fleet_id
                            context.set_trailing_metadata(budget_metadata(event.remaining.by_name()))
                            accepted = event
                        case TextDelta():
                            deltas.append(event)
                        case Finished():
                            finished = event
        assert accepted is not None, "an answer starts with Accepted"
        assert finished is not None, "an answer that does not fail ends with Finished"
        return encode_complete(accepted, deltas, finished)

    def _events(
        self, request: inference_pb2.GenerateRequest, context: Any, outlet: Outlet | None = None
    ) -> AsyncGenerator[Event, None]:
        return self._handler.generate(_tenant(), decode_generate(request), self._deadline(context), outlet)

    def _deadline(self, context: Any) -> float | None:
        left_s = context.time_remaining()
        return None if left_s is None else self._clock.monotonic() + float(left_s)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Any) -> inference_pb2.CancelResponse:
        """Ends a live request of the caller's tenant, wherever it runs."""
        check_request_id(request.request_id)
        if not request.request_id:
            raise InvalidRequestError.of_field("request_id", "is empty; it is the one in Accepted")
        await self._dispatcher.cancel(fleet_request_id(_tenant().tenant_id, request.request_id))
        return inference_pb2.CancelResponse()

    async def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: Any
    ) -> inference_pb2.CountTokensResponse:
        """Counts the tokens that a prompt would take."""
        model = self._fleet.find_model(request.model)
        prompt = check_prompt(decode_prompt(request), model.limits)
        assert not isinstance(prompt, TokenPrompt), "the message has no such field"
        num_tokens = await self._prompts.count(prompt, model)
        return inference_pb2.CountTokensResponse(num_tokens=num_tokens, context_length=model.limits.context_length)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """Lists the models that this gateway knows."""
        models = [
            inference_pb2.Model(
                name=model.limits.model,
                context_length=model.limits.context_length,
                vocab_size=model.limits.vocab_size,
                num_workers=self._fleet.num_ready(model.limits.model),
            )
            for model in self._fleet.models
        ]
        return inference_pb2.ListModelsResponse(models=models)


def _watched(request: inference_pb2.GenerateRequest, deadline: float | None) -> WatchedCall:
    tenant_id = _tenant().tenant_id
    fleet_id = fleet_request_id(tenant_id, request.request_id) if request.request_id else ""
    return WatchedCall(tenant_id, fleet_id, deadline)


def _tenant() -> Tenant:
    tenant = IDENTITY.get()
    if not isinstance(tenant, Tenant):
        raise TypeError("the service must stand behind the tenants' authenticator")
    return tenant
