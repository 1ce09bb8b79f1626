"""Work that nobody waits for: answered once, whatever becomes of gateways and workers."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable

import grpc
import pytest

from client import Client as LibraryClient
from client import Sampling, Text
from common.types import JobState
from protos.inference.v1 import jobs_pb2, types_pb2
from tests.integration.gateway.rig import Client, Rig, eventually, generate_request, has_got, reason_of
from tests.support.scripted_worker import ScriptedWorker, text_of

NUM_TOKENS = 200


async def submitted(client: Client, text: str = "hello", num_tokens: int = 12, **fields: object) -> jobs_pb2.Job:
    request = generate_request(text, sampling={"max_tokens": num_tokens}, **fields)
    return await client.job("Submit", request=request)


async def until(client: Client, job_id: str, condition: Callable[[jobs_pb2.Job], bool]) -> jobs_pb2.Job:
    """The job, as soon as a condition holds."""
    async with asyncio.timeout(60):
        while not condition(job := await client.job("Get", job_id=job_id)):  # noqa: ASYNC110 - as clients do
            await asyncio.sleep(0.05)
    return job


async def ended(client: Client, job_id: str) -> jobs_pb2.Job:
    return await until(client, job_id, lambda job: job.state not in (JobState.WAITING, JobState.RUNNING))


def assert_done(job: jobs_pb2.Job, text: str = "hello", num_tokens: int = 12) -> None:
    assert (job.state, job.message) == (JobState.DONE, "")
    assert job.result.text == text_of(text.encode(), num_tokens)
    assert job.result.usage == types_pb2.Usage(prompt_tokens=len(text), completion_tokens=num_tokens)
    assert job.output_tokens == num_tokens
    assert job.ended_at >= job.created_at > 0


async def test_a_job_is_answered_in_the_low_band_and_its_result_kept(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker)
    job = await submitted(client, return_token_ids=True)
    assert job.state in (JobState.WAITING, JobState.RUNNING)
    done = await ended(client, job.job_id)
    assert_done(done)
    assert bytes(done.result.token_ids).decode() == done.result.text
    assert [submit.band for submit in worker.submitted] == [types_pb2.BAND_LOW]
    assert await client.job("Get", job_id=job.job_id) == done
    await eventually(lambda: app.dispatcher.live == ())


async def test_the_same_job_again_is_the_same_job(rig: Rig) -> None:
    worker = await rig.worker()
    _, client = await rig.serving(worker)
    first = await submitted(client, request_id="mine")
    keyed = await submitted(client, idempotency_key="k")
    for _ in range(2):
        assert (await submitted(client, request_id="mine")).created_at == first.created_at
        assert (await submitted(client, idempotency_key="k")).job_id == keyed.job_id
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await submitted(client, "other", request_id="mine")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert_done(await ended(client, "mine"))
    assert_done(await ended(client, keyed.job_id))
    assert len(worker.submitted) == 2


async def test_progress_is_shown(rig: Rig) -> None:
    worker = await rig.worker(step_s=None)
    _, client = await rig.serving(worker, heartbeat_ttl_s=2.0)
    job = await submitted(client, num_tokens=NUM_TOKENS)
    await worker.wait_for(lambda: len(worker.running) == 1)
    for _ in range(5):
        await worker.step()
    running = await until(client, job.job_id, lambda job: job.output_tokens == 5)
    assert running.state == JobState.RUNNING
    worker.tokens_per_step = NUM_TOKENS
    await worker.step()
    assert_done(await ended(client, job.job_id), num_tokens=NUM_TOKENS)


async def test_a_job_survives_its_workers(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    app, client = await rig.serving(worker, max_attempts=1)
    job = await submitted(client, num_tokens=NUM_TOKENS)
    await has_got(app, 30)
    await _restart(worker)
    await eventually(lambda: app.fleet.is_ready)
    done = await ended(client, job.job_id)
    assert_done(done, num_tokens=NUM_TOKENS)
    assert done.runs == 2, "its one attempt was lost, and it was run again"
    assert len(worker.submitted[-1].output_token_ids) > 5, "from where it was"


async def _restart(worker: ScriptedWorker) -> None:
    port = worker.port
    await worker.kill()
    worker.epoch, worker.port = worker.epoch + 1, port
    await worker.start()


async def test_a_job_survives_the_death_of_its_gateway(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    doomed, first = await rig.serving(worker, heartbeat_ttl_s=2.0)
    job = await submitted(first, num_tokens=NUM_TOKENS)
    await has_got(doomed, 30)
    await doomed._resumption.flush(checks_all=False)  # as it does ten times a second
    await _die(doomed)
    _, second = await rig.serving(worker)
    done = await ended(second, job.job_id)
    assert_done(done, num_tokens=NUM_TOKENS)
    assert done.runs == 2
    assert len(worker.submitted[-1].output_token_ids) > 5
    assert worker.num_generated < 2 * NUM_TOKENS


async def _die(app: object) -> None:
    """What a SIGKILL does, as far as the store can see: nothing is given back, nothing is renewed."""
    runner = app._job_runner  # type: ignore[attr-defined]

    async def nothing(*_: object, **__: object) -> bool:
        return True

    runner._jobs.release = runner._jobs.renew = runner._jobs.finish = nothing
    await app._background.close()  # type: ignore[attr-defined]


async def test_a_job_survives_the_deployment_of_its_gateway(rig: Rig) -> None:
    num_tokens = 2000
    worker = await rig.worker(step_s=0.01)
    leaving, first = await rig.serving(worker)
    job = await submitted(first, num_tokens=num_tokens)
    await has_got(leaving, 30)
    _, second = await rig.serving(worker)
    await rig.stop(leaving, drain_s=5)
    await worker.wait_for(lambda: len(worker.sessions) == 1)
    worker.tokens_per_step = 50
    done = await ended(second, job.job_id)
    assert_done(done, num_tokens=num_tokens)
    assert done.runs == 2
    assert len(worker.submitted[-1].output_token_ids) > 20, "from where it was"


async def test_many_jobs_are_each_answered_once_by_any_gateway(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=16)
    clients = [(await rig.serving(worker))[1] for _ in range(2)]
    jobs = await asyncio.gather(*(submitted(clients[n % 2], f"prompt {n}") for n in range(40)))
    for number, job in enumerate(jobs):
        assert_done(await ended(clients[0], job.job_id), f"prompt {number}")
    assert len(worker.submitted) == 40


async def test_a_cancelled_job_stops(rig: Rig) -> None:
    worker = await rig.worker(step_s=0.01)
    app, client = await rig.serving(worker, heartbeat_ttl_s=0.8)
    job = await submitted(client, num_tokens=4000)
    await worker.wait_for(lambda: any(it.num_emitted > 5 for it in worker.running))
    assert (await client.job("Cancel", job_id=job.job_id)).state == JobState.CANCELLED
    await worker.wait_for(lambda: not worker.running)
    await eventually(lambda: app.dispatcher.live == ())
    assert (await client.job("Cancel", job_id=job.job_id)).state == JobState.CANCELLED
    assert (await client.job("Get", job_id=job.job_id)).state == JobState.CANCELLED


async def test_jobs_are_listed_by_page_newest_first_and_to_their_tenant_alone(rig: Rig) -> None:
    app, client = await rig.serving(await rig.worker())
    ids = [(await submitted(client, request_id=f"job-{n}")).job_id for n in range(7)]
    seen, token = [], ""
    while True:
        request = jobs_pb2.ListJobsRequest(page_size=3, page_token=token)
        page = await client.jobs.List(request, metadata=client.metadata)
        seen += [job.job_id for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert seen == ids[::-1]
    stranger = await rig.client(app, "key-paid")
    assert not (await stranger.jobs.List(jobs_pb2.ListJobsRequest(), metadata=stranger.metadata)).jobs
    for method in ("Get", "Cancel"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stranger.job(method, job_id="job-0")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    for job_id in ids:
        await ended(client, job_id)


async def test_bad_jobs_are_refused_and_results_are_forgotten(rig: Rig) -> None:
    worker = await rig.worker()
    app, client = await rig.serving(worker, job_ttl_s=0.5, max_jobs_per_tenant=2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.job("Submit", request=generate_request(sampling={"temperature": -1}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for request in (jobs_pb2.ListJobsRequest(page_size=101), jobs_pb2.ListJobsRequest(page_token="x")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.jobs.List(request, metadata=client.metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await asyncio.gather(*(submitted(client, num_tokens=4000, request_id=f"long-{n}") for n in range(2)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await submitted(client)
    assert reason_of(caught.value) == "QUEUE_FULL"
    for number in range(2):
        await client.job("Cancel", job_id=f"long-{number}")
    async with asyncio.timeout(60):
        while (await client.jobs.List(jobs_pb2.ListJobsRequest(), metadata=client.metadata)).jobs:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await rig.stop(app, 0)
    _, client = await rig.serving(worker, max_jobs_per_tenant=2)  # which keeps it until it is looked at
    job = await submitted(client)
    assert_done(await ended(client, job.job_id))


async def test_the_library_and_the_command_line(rig: Rig) -> None:
    app, _ = await rig.serving(await rig.worker())
    address = f"127.0.0.1:{app.port}"
    async with LibraryClient(address, "key-acme") as client:
        job = await client.submit_job(Text("hello"), Sampling(max_tokens=12), job_id="mine")
        async with asyncio.timeout(60):
            while (job := await client.get_job("mine")).result is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert job.result.text == text_of(b"hello", 12)
        assert [(it.job_id, it.state) for it in await client.list_jobs()] == [("mine", JobState.DONE)]
        assert (await client.cancel_job("mine")).state is JobState.DONE

    async def run(*arguments: str) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "client", "jobs", *arguments, "--address", address, "--api-key", "key-acme"]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        stdout, _ = await process.communicate()
        return process.returncode, stdout.decode()

    assert await run("get", "mine") == (0, text_of(b"hello", 12) + "\n")
    assert await run("submit", "hi", "--id", "other", "--max-tokens", "3") == (0, "other\n")
    status, listed = await run("list", "--json")
    assert (status, listed.count('"job_id"')) == (0, 2)
    assert (await run("cancel", "mine"))[0] == 1
    assert (await run("get", "nobody"))[0] == 1
    async with LibraryClient(address, "key-acme") as client, asyncio.timeout(60):
        while (await client.get_job("other")).result is None:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0.05)
