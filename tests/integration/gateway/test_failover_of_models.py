"""Real workers with a small random model that lose or hand back requests: not a byte of any answer changes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from common.rpc.probe import wait_until_serving
from launcher.ports import free_ports
from launcher.process import Child
from tests.integration.gateway.rig import FLEET_KEY, Answer, Rig, eventually, generate_request, read, reason_of
from tests.support.models import random_model, save_folder

pytestmark = pytest.mark.timeout(900)

START_S = 240.0  # for the programs to load what they need, on any machine
NUM_TOKENS = 160
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS, "logprobs": 2, "repetition_penalty": 1.1}
SEEDED = {
    "seed": 11,
    "temperature": 1.2,
    "top_p": 0.9,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.1,
    "ignore_eos": True,
    "max_tokens": NUM_TOKENS,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    return save_folder(random_model("llama"), folder)


@pytest.fixture
def extra_settings() -> dict[str, str]:
    """Of the workers; to be overridden."""
    return {}


@pytest.fixture
async def workers(
    model_folder: Path, tmp_path: Path, extra_settings: dict[str, str]
) -> AsyncIterator[list[tuple[Child, str]]]:
    """Two worker processes, which serve."""
    async with AsyncExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        children = []
        for number, address in enumerate(addresses):
            settings = {
                "model": str(model_folder),
                "model_name": "tiny",
                "listen": address,
                "metrics_listen": "",
                "kernels": "reference",
                "dtype": "float32",
                "threads": "1",
                "kv_cache_mib": "8",
                "worker_id": f"w{number}",
                "drain_s": "0.05",
                **extra_settings,
            }
            env = {f"TIDEGATE_WORKER_{name.upper()}": value for name, value in settings.items()}
            env |= os.environ | {"TIDEGATE_FLEET_KEY": FLEET_KEY}
            child = await Child.start(f"worker-{number}", [sys.executable, "-m", "worker"], env, tmp_path)
            stack.push_async_callback(child.stop, drain_s=10)
            children.append(child)
        for address in addresses:
            async with asyncio.timeout(START_S):
                await wait_until_serving(address)
        yield list(zip(children, addresses, strict=True))


def requests() -> list[Any]:
    """Every kind of sampling that must not notice, each twice so that both workers get some."""
    samplings = [GREEDY, SEEDED, {**GREEDY, "logprobs": None}, {**SEEDED, "seed": 12}]
    return [
        generate_request(f"Once upon a time {n % 4}", sampling=sampling, return_token_ids=True)
        for n, sampling in enumerate(samplings * 2)
    ]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_no_byte_changes_when_a_worker_leaves(
    rig: Rig, workers: list[tuple[Child, str]], end: signal.Signals
) -> None:
    # A drain's end is no loss: not one is allowed then.
    app = await rig.gateway(
        workers=",".join(address for _, address in workers), max_attempts=1 if end is signal.SIGTERM else 3
    )
    client = await rig.client(app)
    await eventually(lambda: app.fleet.num_ready("tiny") == 2)
    undisturbed = await asyncio.gather(*(read(client.generate(request, timeout=300)) for request in requests()))
    asked = [asyncio.create_task(read(client.generate(request, timeout=300))) for request in requests()]

    def on_first() -> list[int]:
        claims = [(live.claim, len(live.output_token_ids)) for live in app.dispatcher.live]
        return [count for claim, count in claims if claim is not None and claim.worker_id == "w0"]

    await eventually(lambda: len(on_first()) >= 2 and min(on_first()) > 3)
    os.kill(workers[0][0].pid, end)
    answers = await asyncio.gather(*asked)
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert_same(answer, expected)
    cause = "worker_lost" if end is signal.SIGKILL else "worker_closed"
    assert (app._registry.get_sample_value("tidegate_gateway_requeued_total", {"cause": cause}) or 0) >= 2


@pytest.mark.parametrize(
    "extra_settings", [{"kv_cache_mib": "1", "long_after_steps": "16", "hand_back_s": "0", "swap_mib": "0"}]
)
async def test_no_byte_changes_when_workers_short_of_memory_hand_requests_back(
    rig: Rig, workers: list[tuple[Child, str]]
) -> None:
    """Each holds 2048 tokens; requests of 300 tokens, 16 of them, come at once, and are expected to be shorter."""
    app = await rig.gateway(workers=",".join(address for _, address in workers), max_attempts=1)
    client = await rig.client(app)
    await eventually(lambda: app.fleet.num_ready("tiny") == 2)
    kinds = [
        generate_request(f"Once upon a time {n % 2}", sampling={**sampling, "max_tokens": 280}, return_token_ids=True)
        for n, sampling in enumerate([GREEDY, SEEDED] * 2)
    ]
    undisturbed = await asyncio.gather(*(read(client.generate(request, timeout=300)) for request in kinds))
    crowded = await asyncio.gather(*(read(client.generate(request, timeout=300)) for request in kinds * 4))
    for answer, expected in zip(crowded, undisturbed * 4, strict=True):
        assert_same(answer, expected, 280)
    handed_back = {"cause": "handed_back"}
    assert (app._registry.get_sample_value("tidegate_gateway_requeued_total", handed_back) or 0) >= 1


def assert_same(answer: Answer, expected: Answer, num_tokens: int = NUM_TOKENS) -> None:
    assert answer.error is None, reason_of(answer.error)
    assert expected.error is None
    assert answer.finished is not None
    assert expected.finished is not None
    assert len(answer.token_ids) == num_tokens
    assert answer.token_ids == expected.token_ids
    assert answer.text == expected.text
    assert answer.finished.reason == expected.finished.reason
    assert answer.finished.usage.prompt_tokens == expected.finished.usage.prompt_tokens
    assert answer.finished.usage.completion_tokens == num_tokens
    logprobs, wanted = ([it for delta in one.deltas for it in delta.logprobs] for one in (answer, expected))
    assert [it.sampled.token_id for it in logprobs] == [it.sampled.token_id for it in wanted]
    assert [it.sampled.logprob for it in logprobs] == pytest.approx([it.sampled.logprob for it in wanted], abs=1e-3)
