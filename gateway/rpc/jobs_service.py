"""What clients call for work that they do not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.errors import DuplicateRequestError, InvalidRequestError, NotFoundError, UnavailableError
from common.rpc.interceptors import IDENTITY
from gateway.answer import Accepted, Finished, TextDelta
from gateway.handler import Handler
from gateway.job_runner import JobCodec
from gateway.jobs import Job, JobStore
from gateway.requests import GenerateCall, check_request_id
from gateway.resumption import digest_of, key_request_id
from gateway.rpc.codec import decode_generate, encode_complete
from gateway.store_calls import StoreCalls
from gateway.store_health import StoreHealth
from gateway.tenants import Tenant
from protos.inference.v1 import inference_pb2, jobs_pb2, jobs_pb2_grpc, types_pb2

SERVICE_NAME = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name
register = jobs_pb2_grpc.add_JobsServicer_to_server

_MAX_PAGE_SIZE = 100


def _decode(raw: bytes) -> GenerateCall:
    return decode_generate(inference_pb2.GenerateRequest.FromString(raw))


def _encode(accepted: Accepted, deltas: list[TextDelta], finished: Finished) -> bytes:
    return encode_complete(accepted, deltas, finished).SerializeToString()


JOB_CODEC = JobCodec(_decode, _encode)
"""The store keeps the messages as they came and as they will go."""


class JobsService(jobs_pb2_grpc.JobsServicer):
    """Translates; the job runners of all gateways do the work."""

    def __init__(
        self, jobs: JobStore, calls: StoreCalls, handler: Handler, store: StoreHealth, *, choose_id: Callable[[], str]
    ) -> None:
        self._jobs = jobs
        self._calls = calls
        self._handler = handler
        self._store = store
        self._choose_id = choose_id

    async def Submit(self, request: jobs_pb2.SubmitJobRequest, context: Any) -> jobs_pb2.SubmitJobResponse:
        """Keeps a request until it is answered."""
        tenant = _tenant()
        call = decode_generate(request.request)
        await self._handler.check(tenant, call)
        key = call.idempotency_key
        job_id = key_request_id(key) if key else call.request_id or self._choose_id()
        digest = digest_of(call)
        packed = request.request.SerializeToString()

        async def submit() -> tuple[bool, Job]:
            try:
                is_new = await self._jobs.submit(tenant.tenant_id, job_id, packed, digest)
            except UnavailableError as error:
                self._store.failed(error)
                raise
            return is_new, await self._get(tenant, job_id)

        async def undo(_: tuple[bool, Job]) -> None:
            if not (key or call.request_id):  # else its client finds it with the next try
                await self._jobs.cancel(tenant.tenant_id, job_id)

        is_new, job = await self._calls.ask(submit, undo)
        if not is_new and job.digest != digest:
            raise DuplicateRequestError("request_id: is the id of a job with another content")
        return jobs_pb2.SubmitJobResponse(job=_encode_job(job))

    async def Get(self, request: jobs_pb2.GetJobRequest, context: Any) -> jobs_pb2.GetJobResponse:
        """A job of the caller's tenant."""
        return jobs_pb2.GetJobResponse(job=_encode_job(await self._get(_tenant(), request.job_id)))

    async def List(self, request: jobs_pb2.ListJobsRequest, context: Any) -> jobs_pb2.ListJobsResponse:
        """The jobs of the caller's tenant."""
        if request.page_size > _MAX_PAGE_SIZE:
            raise InvalidRequestError.of_field("page_size", f"is {request.page_size}; at most {_MAX_PAGE_SIZE}")
        if request.page_token and not (request.page_token.isdecimal() and len(request.page_token) <= 16):
            raise InvalidRequestError.of_field("page_token", "must be the next_page_token of another page, or empty")
        limit = request.page_size or _MAX_PAGE_SIZE
        jobs, after = await self._jobs.page(_tenant().tenant_id, limit=limit, before=request.page_token)
        return jobs_pb2.ListJobsResponse(jobs=map(_encode_job, jobs), next_page_token=after)

    async def Cancel(self, request: jobs_pb2.CancelJobRequest, context: Any) -> jobs_pb2.CancelJobResponse:
        """Ends a job that has not ended."""
        tenant = _tenant()
        await self._get(tenant, request.job_id)
        await self._jobs.cancel(tenant.tenant_id, request.job_id)
        return jobs_pb2.CancelJobResponse(job=_encode_job(await self._get(tenant, request.job_id)))

    async def _get(self, tenant: Tenant, job_id: str) -> Job:
        check_request_id(job_id)
        job = await self._jobs.get(tenant.tenant_id, job_id) if job_id else None
        if job is None:
            raise NotFoundError("job_id: no job of this tenant has it")
        return job


def _encode_job(job: Job) -> jobs_pb2.Job:
    message = jobs_pb2.Job(
        job_id=job.job_id,
        state=jobs_pb2.JobState.ValueType(job.state),
        output_tokens=job.num_output_tokens,
        created_at=job.created_at,
        ended_at=job.ended_at,
        runs=job.num_runs,
        message=job.message,
    )
    if job.result:
        message.result.ParseFromString(job.result)
    if job.reason is not None:
        message.reason = types_pb2.Reason.ValueType(job.reason.value)
    return message


def _tenant() -> Tenant:
    tenant = IDENTITY.get()
    if not isinstance(tenant, Tenant):
        raise TypeError("the service must stand behind the tenants' authenticator")
    return tenant
