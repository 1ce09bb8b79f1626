"""Two gateways and two workers with the real model on one Redis, as a client sees them."""

from __future__ import annotations

import asyncio
import secrets
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from client import Accepted, Chat, Client, ClientError, Delta, Finished, Message, Sampling, Tokens
from common.default_model import ensure_default_model
from common.types import FinishReason, SamplingParams
from tests.e2e.deployment import Deployment, deployment
from tests.support.prompts import Prompt, real_prompts
from worker.app import load_engine
from worker.config import WorkerSettings

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

QUESTION = Message("user", "What is the capital of France? Answer in one sentence.")
GREEDY = Sampling(temperature=0, max_tokens=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_by_two(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> AsyncIterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("two-by-two")
    pool = f"test-{secrets.token_hex(4)}"
    async with deployment(folder, redis_url, pool, num_gateways=2, num_workers=2) as built:
        yield built


async def answer_of(client: Client, messages: list[Message], sampling: Sampling = GREEDY) -> tuple[str, Finished]:
    text = ""
    async for event in client.chat(messages, sampling):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Finished):
            return text, event
    raise AssertionError("no Finished")


def metric(address: str, name: str) -> float:
    """The value of a metric without labels, from a program's Prometheus endpoint."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))


async def test_a_conversation(two_by_two: Deployment) -> None:
    async with two_by_two.client() as client:
        text, finished = await answer_of(client, [QUESTION])
        assert "Paris" in text
        assert finished.reason is FinishReason.STOP
        assert finished.usage.completion_tokens > 1
        turns = [QUESTION, Message("assistant", text), Message("user", "And of Italy?")]
        second, finished = await answer_of(client, turns)
        assert second
        assert finished.usage.prompt_tokens > 40


async def test_both_gateways_use_both_workers_and_agree(two_by_two: Deployment) -> None:
    async with two_by_two.client(gateway=0) as first, two_by_two.client(gateway=1) as second:
        asked = [client.complete(Chat([QUESTION]), GREEDY) for client in (first, second) * 8]
        answers = await asyncio.gather(*asked)
    assert {answer.text for answer in answers} == {answers[0].text}
    for address in two_by_two.worker_metrics:
        metrics = await asyncio.to_thread(lambda url: urllib.request.urlopen(url).read(), f"http://{address}/metrics")
        counts = [
            line for line in metrics.decode().splitlines() if line.startswith("tidegate_worker_output_tokens_total")
        ]
        assert float(counts[0].split()[1]) > 0, "a worker has generated nothing"


async def test_a_cancel_reaches_the_gateway_that_holds_the_stream(two_by_two: Deployment) -> None:
    async with two_by_two.client(gateway=0) as holder, two_by_two.client(gateway=1) as other:
        sampling = Sampling(temperature=0, max_tokens=4000, ignore_eos=True)
        async with aclosing(holder.chat([QUESTION], sampling, request_id="to-cancel")) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    await other.cancel("to-cancel")
                last = event
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.CANCELLED


async def test_a_tenant_cannot_cancel_another_tenants_request(two_by_two: Deployment) -> None:
    async with (
        two_by_two.client("regular") as holder,
        two_by_two.client("batch") as other,
        aclosing(holder.chat([QUESTION], GREEDY, request_id="mine")) as events,
    ):
        assert isinstance(await anext(events), Accepted)
        with pytest.raises(ClientError) as caught:
            await other.cancel("mine")
        assert caught.value.status == "NOT_FOUND"


async def test_greedy_tokens_over_the_wire_equal_those_in_process(two_by_two: Deployment) -> None:
    prompts, wanted = await asyncio.to_thread(generate_in_process)
    async with two_by_two.client(gateway=0) as first, two_by_two.client(gateway=1) as second:
        completions = await asyncio.gather(
            *(
                (first, second)[index % 2].complete(
                    Tokens(prompt.token_ids),
                    Sampling(temperature=0, max_tokens=prompt.num_output, ignore_eos=True),
                    return_token_ids=True,
                )
                for index, prompt in enumerate(prompts)
            )
        )
    got = {prompt.name: list(completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)}
    assert got == wanted


def generate_in_process() -> tuple[list[Prompt], dict[str, list[int]]]:
    """Greedy output of the same model by an engine in this process, all requests in one batch."""
    settings = WorkerSettings(model=str(ensure_default_model()), dtype="float32", kv_cache_mib=256, threads=1)
    engine, description = load_engine(settings)
    prompts = real_prompts(Tokenizer.from_buffer(description.tokenizer_json))
    engine.open_session(1)
    for prompt in prompts:
        sampling = SamplingParams(seed=0, max_tokens=prompt.num_output, temperature=0, ignore_eos=True)
        engine.submit(1, prompt.name, 1, prompt.token_ids, sampling)
    wanted: dict[str, list[int]] = {prompt.name: [] for prompt in prompts}
    while engine.num_requests:
        for news in engine.step().sessions.values():
            for output in news.outputs:
                wanted[output.request_id].extend(output.token_ids)
    return prompts, wanted
