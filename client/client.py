"""The asynchronous Python client of a Tidegate deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.codec import to_completion, to_count_request, to_event, to_generate_request
from client.errors import ClientError, from_rpc_error
from client.jobs import Job, to_job
from client.types import Chat, Completion, Event, Finished, Message, Model, Prompt, Sampling, Text, TokenCount
from common.clock import Clock, SystemClock
from common.types import Band
from protos.inference.v1 import inference_pb2, inference_pb2_grpc, jobs_pb2, jobs_pb2_grpc

SERVICE_NAME = "inference.v1.Inference"

_STATUS_WAIT_S = 1.0  # for a call's status, once its answer is whole
_DEFAULT_SAMPLING = Sampling()
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How the client treats its connection."""

    max_message_bytes: int = 64 * 1024 * 1024  # largest message taken or sent; the server has its own limit
    keepalive_time_s: float = 20.0  # a ping after so long without traffic; servers take offence below 10
    keepalive_timeout_s: float = 20.0  # without an answer for so long the connection is given up
    max_retries: int = 0  # of a refused call; only where the server names a wait and nothing was received yet
    max_retry_wait_s: float = 30.0  # a longer wait is the caller's decision
    server_name: str = ""  # that the server's certificate must carry; empty: the address's host

    def to_grpc(self) -> list[tuple[str, int | str]]:
        """Channel arguments."""
        name: list[tuple[str, int | str]] = []
        if self.server_name:
            name.append(("grpc.ssl_target_name_override", self.server_name))
        return [
            *name,
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", round(self.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_s * 1000)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.primary_user_agent", "tidegate-client"),
        ]


_DEFAULT_OPTIONS = ClientOptions()


class Client:
    """A connection to a gateway; an async context manager. Every method raises ClientError when its call fails.

    The connection is made with the first call and made again when it breaks.

        async with Client("127.0.0.1:50051", api_key) as client:
            async for event in client.chat([Message("user", "Hello!")]):
                if isinstance(event, Delta):
                    print(event.text, end="")
    """

    def __init__(
        self,
        address: str,
        api_key: str = "",
        *,
        options: ClientOptions = _DEFAULT_OPTIONS,
        credentials: grpc.ChannelCredentials | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`address`: host:port. `credentials`: of a TLS connection; None: plain text, for trusted networks.

        Raises ValueError if the key cannot be sent.
        """
        if not (api_key.isascii() and api_key.isprintable()) or api_key != api_key.strip():
            raise ValueError("the API key has other characters than printable ASCII, or spaces around it")
        self._options = options
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options.to_grpc())
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options.to_grpc())
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._jobs = jobs_pb2_grpc.JobsStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and close the connection."""
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        model: str = "",
        request_id: str = "",
        band: Band | None = None,
        return_token_ids: bool = False,
        resumable: bool = False,
        idempotency_key: str = "",
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """One Accepted, any number of Deltas, one Finished. Nothing is raised behind that: the answer is whole.

        The request is cancelled when the caller stops iterating: at once with `contextlib.aclosing`, else when the
        iterator is collected. `timeout_s` bounds the whole answer, waits before retries included.
        A `resumable` answer that broke off can be gone on with by `resume`. A second call with the same
        `idempotency_key` and content gets the answer of the first one; nothing is generated twice.
        """
        request = to_generate_request(
            prompt,
            sampling,
            model=model,
            request_id=request_id,
            band=band,
            return_token_ids=return_token_ids,
            resumable=resumable,
            idempotency_key=idempotency_key,
        )
        return self._stream(self._stub.Generate, request, timeout_s)

    def resume(
        self, request_id: str, offset: int = 0, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """The rest of a resumable answer, from any gateway: what `generate` gives, without what came before `offset`.

        `offset` is that of the last Delta received; 0 is the whole answer. A stream of it that is still open ends.
        """
        request = inference_pb2.ResumeRequest(request_id=request_id, offset=offset)
        return self._stream(self._stub.Resume, request, timeout_s)

    async def _stream(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[_Request, inference_pb2.GenerateResponse],
        request: _Request,
        timeout_s: float | None,
    ) -> AsyncGenerator[Event, None]:
        retry = _Retry(self._options, self._clock, timeout_s)
        while True:
            has_begun = False
            call = method(request, timeout=retry.time_left_s(), metadata=self._metadata)
            try:
                async for response in call:
                    has_begun = True
                    event = to_event(response)
                    if event is not None:
                        yield event
                    if isinstance(event, Finished):
                        await _over(call)
                        return
                raise ClientError("INTERNAL", "the stream ended without saying how the answer ended")
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                wait_s = None if has_begun else retry.wait_s(failure)
                if wait_s is None:
                    raise failure from error
            finally:
                call.cancel()
            await self._sleep(wait_s)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        model: str = "",
        request_id: str = "",
        band: Band | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """`generate` for the next turn of a conversation."""
        return self.generate(
            Chat(messages), sampling, model=model, request_id=request_id, band=band, timeout_s=timeout_s
        )

    async def complete(
        self,
        prompt: Prompt,
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        model: str = "",
        request_id: str = "",
        band: Band | None = None,
        return_token_ids: bool = False,
        idempotency_key: str = "",
        timeout_s: float | None = None,
    ) -> Completion:
        """The whole answer at once. `idempotency_key` as for `generate`."""
        request = to_generate_request(
            prompt,
            sampling,
            model=model,
            request_id=request_id,
            band=band,
            return_token_ids=return_token_ids,
            idempotency_key=idempotency_key,
        )
        return to_completion(await self._unary(self._stub.Complete, request, timeout_s))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End a live request of this tenant; its stream ends with FinishReason.CANCELLED."""
        await self._unary(self._stub.Cancel, inference_pb2.CancelRequest(request_id=request_id), timeout_s)

    async def count_tokens(self, prompt: Chat | Text, *, model: str = "", timeout_s: float | None = None) -> TokenCount:
        """The tokens that a prompt would take, template included."""
        request = to_count_request(prompt, model)
        answer = await self._unary(self._stub.CountTokens, request, timeout_s)
        return TokenCount(answer.num_tokens, answer.context_length)

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        """The models that can be asked for."""
        answer = await self._unary(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout_s)
        return [Model(each.name, each.context_length, each.vocab_size, each.num_workers) for each in answer.models]

    async def submit_job(
        self,
        prompt: Prompt,
        sampling: Sampling = _DEFAULT_SAMPLING,
        *,
        model: str = "",
        job_id: str = "",
        return_token_ids: bool = False,
        idempotency_key: str = "",
        timeout_s: float | None = None,
    ) -> Job:
        """Leave a request to be answered in the low band. The same `job_id` or key again is the same job."""
        request = to_generate_request(
            prompt,
            sampling,
            model=model,
            request_id=job_id,
            band=None,
            return_token_ids=return_token_ids,
            idempotency_key=idempotency_key,
        )
        submit = jobs_pb2.SubmitJobRequest(request=request)
        return to_job((await self._unary(self._jobs.Submit, submit, timeout_s)).job)

    async def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """A job as it is now, with its result if it is done."""
        return to_job((await self._unary(self._jobs.Get, jobs_pb2.GetJobRequest(job_id=job_id), timeout_s)).job)

    async def list_jobs(self, *, timeout_s: float | None = None) -> list[Job]:
        """All jobs that are kept, newest first, without results. `timeout_s` is for each page."""
        jobs: list[Job] = []
        token = ""
        while True:
            page = await self._unary(self._jobs.List, jobs_pb2.ListJobsRequest(page_token=token), timeout_s)
            jobs.extend(map(to_job, page.jobs))
            token = page.next_page_token
            if not token:
                return jobs

    async def cancel_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """End a job that has not ended; the job as it then is."""
        return to_job((await self._unary(self._jobs.Cancel, jobs_pb2.CancelJobRequest(job_id=job_id), timeout_s)).job)

    async def health(self, service: str = SERVICE_NAME, *, timeout_s: float | None = 5.0) -> str:
        """SERVING, NOT_SERVING or SERVICE_UNKNOWN; needs no API key. An empty `service` is the whole server."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise from_rpc_error(error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer], request: _Request, timeout_s: float | None
    ) -> _Answer:
        retry = _Retry(self._options, self._clock, timeout_s)
        while True:
            try:
                return await method(request, timeout=retry.time_left_s(), metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                failure = from_rpc_error(error)
                wait_s = retry.wait_s(failure)
                if wait_s is None:
                    raise failure from error
            await self._sleep(wait_s)


async def _over(call: grpc.aio.UnaryStreamCall[_Request, inference_pb2.GenerateResponse]) -> None:
    """Waits for the formal end of a call whose answer is whole, so that its server does not see it cancelled.

    What becomes of the connection meanwhile says nothing about the answer any more.
    """
    with suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(_STATUS_WAIT_S):
            async for _ in call:
                pass


class _Retry:
    """Whether and when a refused call is made again."""

    def __init__(self, options: ClientOptions, clock: Clock, timeout_s: float | None) -> None:
        self._options = options
        self._clock = clock
        self._deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        self._num_retries = 0

    def time_left_s(self) -> float | None:
        """Seconds for the next attempt; None: no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())

    def wait_s(self, failure: ClientError) -> float | None:
        """Seconds to wait before the next attempt; None: there is none."""
        wait_s, time_left_s = failure.retry_after_s, self.time_left_s()
        if wait_s is None or self._num_retries >= self._options.max_retries:
            return None
        if wait_s > self._options.max_retry_wait_s or (time_left_s is not None and wait_s >= time_left_s):
            return None
        self._num_retries += 1
        return wait_s
