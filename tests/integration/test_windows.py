"""What a request sees of itself: its own window or its model's, as a masked `transformers` computes it, whatever the
chunks and the cache; and over real gRPC a conversation that is longer than the worker's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from client import Client, Sampling, Tokens
from client.errors import ClientError
from common.types import ModelLimits, Reason, SamplingParams
from common.window import Window, Windows, narrow
from tests.integration.gateway.rig import FLEET_KEY, Rig
from tests.support.models import random_model, save_folder
from tests.support.redis import *  # noqa: F403
from worker.app import Worker
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.config import WorkerSettings
from worker.engine.engine import Engine
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.kernels import load_backend
from worker.model.loaded_model import LoadedModel
from worker.model.runner import ModelRunner
from worker.model.sampler import Sampler
from worker.model.weights import load_model

BLOCK = 8
OWN = 20  # tokens that Gemma's local layers see
TOLERANCE = 1e-3  # of log probabilities
SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": OWN},
    "gemma3_text": {"sliding_window": OWN, "sliding_window_pattern": 2},
    "qwen3": {"sliding_window": OWN, "use_sliding_window": True, "max_window_layers": 1},
}


@dataclass
class Family:
    model: PreTrainedModel
    folder: Path
    loaded: LoadedModel


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    torch.set_num_threads(1)
    found = {}
    for name, changes in CHANGES.items():
        model = random_model(name, **(SHAPE | changes))
        folder = save_folder(model, tmp_path_factory.mktemp(name))
        found[name] = Family(model, folder, load_model(folder, torch.float32))
    return found


def mask(num_tokens: int, window: Window | None) -> Tensor:
    """What to add to scores, [1, 1, num_tokens, num_tokens]: nothing where a token is seen."""
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
    seen = key <= query
    if window is not None:
        seen &= (query - key < window.num_tokens) | (key < window.num_sinks)
    return torch.zeros(num_tokens, num_tokens).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def expected_logprobs(model: PreTrainedModel, token_ids: Sequence[int], window: Window | None) -> Tensor:
    """Log probabilities after every token, [tokens, vocab], all at once, every layer with a mask."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    own = getattr(model.config, "sliding_window", None)
    if model.config.model_type == "mistral":
        kinds = ["sliding_attention"]
    masks = {
        kind: mask(len(token_ids), narrow(Window(own) if kind == "sliding_attention" else None, window))
        for kind in set(kinds)
    }
    whole: Any = masks if len(masks) > 1 or model.config.model_type not in ("llama", "mistral") else masks[kinds[0]]
    logits: Tensor = model(torch.tensor([list(token_ids)]), attention_mask=whole, use_cache=False).logits[0]
    return logits.log_softmax(-1)


def check_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    output: Sequence[int],
    window: Window | None,
    logprobs: Sequence[float] = (),
) -> None:
    """Every token of the output is the most probable one after those before it, and as probable as it is said to be."""
    expected = expected_logprobs(model, [*prompt, *output], window)[len(prompt) - 1 : -1]
    best = expected.max(-1)
    chosen = expected[range(len(output)), list(output)]
    assert float((best.values - chosen).max()) <= TOLERANCE, (best.indices.tolist(), list(output))
    if logprobs:
        assert float((chosen - torch.tensor(logprobs)).abs().max()) <= TOLERANCE


class SmallEngine:
    """An engine over a small model, with a prefix cache; every step is audited."""

    def __init__(self, loaded: LoadedModel, *, max_chunk: int, num_blocks: int = 96, backend: str = "cpu") -> None:
        config = loaded.config
        self._runner = ModelRunner(
            config,
            loaded.tensors,
            backend=load_backend(backend),
            dtype=torch.float32,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=max_chunk + 4,
            sampler=Sampler(config.vocab_size, ()),
            num_threads=1,
        )
        pool, windows = BlockPool(num_blocks), self._runner.windows
        manager = CacheManager(pool, BLOCK, keyed_digest(b""), windows=windows, max_chunk_tokens=max_chunk)
        bounds = SchedulerConfig(4, max_chunk + 4, max_chunk)
        limits = ModelLimits("m", 1024, config.vocab_size, BLOCK, num_blocks - 1, 4, windows, max_chunk)
        self._engine = Engine(self._runner, Scheduler(manager, bounds), manager, limits, ())
        self._engine.open_session(1)
        self._num_requests = 0

    @property
    def windows(self) -> Windows:
        return self._runner.windows

    def answer(
        self, prompt: Sequence[int], max_tokens: int, window: Window | None
    ) -> tuple[list[int], list[float], int]:
        """Tokens, their log probabilities, and how many tokens of the prompt were cached."""
        own = {} if window is None else {"kv_window_tokens": window.num_tokens, "kv_sink_tokens": window.num_sinks}
        sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, logprobs=0, ignore_eos=True, **own)
        self._num_requests += 1
        self._engine.submit(1, str(self._num_requests), 1, list(prompt), sampling)
        tokens: list[int] = []
        logprobs: list[float] = []
        num_cached = 0
        while self._engine.has_work:
            output = self._engine.step()
            self._engine.check_integrity()
            for event in output.sessions[1].outputs if 1 in output.sessions else ():
                tokens += event.token_ids
                logprobs += [it.sampled.logprob for it in event.logprobs]
                num_cached = max(num_cached, event.cached_prompt_tokens)
        return tokens, logprobs, num_cached

    def close(self) -> None:
        self._runner.close()


@pytest.mark.parametrize("family", CHANGES)
def test_a_window_equals_a_mask_for_any_chunks_and_with_the_cache(families: dict[str, Family], family: str) -> None:
    """Prompts of a window less one token, a window, one more, and more than a block beyond; then asked again."""
    case = families[family]
    prompts = torch.randint(3, 320, (60,), generator=torch.Generator().manual_seed(5)).tolist()

    @settings(max_examples=8, deadline=None)
    @given(
        num_tokens=st.sampled_from([1, 7, 8, 9, 15, 16, 17, OWN - 1, OWN, 31]),
        num_sinks=st.sampled_from([0, 1, 4, 8, 9]),
        beyond=st.sampled_from([-1, 0, 1, 8, 25]),
        max_chunk=st.sampled_from([1, 3, 8, 13, 64]),
    )
    def check(num_tokens: int, num_sinks: int, beyond: int, max_chunk: int) -> None:
        engine = SmallEngine(case.loaded, max_chunk=max_chunk)
        if None not in engine.windows:
            num_tokens = min(num_tokens, OWN)
        window = Window(num_tokens, min(num_sinks, num_tokens))
        prompt = prompts[: max(1, num_tokens + beyond)]
        # The others' blocks of the same tokens hold other keys and values.
        for asked in (None, window, window, None):
            tokens, logprobs, num_cached = engine.answer(prompt, 10, asked)
            check_greedy(case.model, prompt, tokens, asked, logprobs)
        assert num_cached >= (len(prompt) - 1) // BLOCK * BLOCK
        longer = [*prompt, *engine.answer(prompt, 10, window)[0], 7]
        tokens, logprobs, num_cached = engine.answer(longer, 10, window)
        check_greedy(case.model, longer, tokens, window, logprobs)
        assert num_cached >= (len(prompt) + 8) // BLOCK * BLOCK
        engine.close()

    check()


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3"])
def test_local_layers_hold_their_window_and_global_ones_all(families: dict[str, Family], family: str) -> None:
    """In a pool that all layers' blocks of the request would not fit into."""
    case = families[family]
    prompt = torch.randint(3, 320, (300,), generator=torch.Generator().manual_seed(6)).tolist()
    whole = -(-330 // BLOCK)
    windows = SmallEngine(case.loaded, max_chunk=16).windows
    num_global = windows.count(None)
    engine = SmallEngine(case.loaded, max_chunk=16, num_blocks=1 + whole * num_global + 6 * (len(windows) - num_global))
    tokens, logprobs, _ = engine.answer(prompt, 30, None)
    check_greedy(case.model, prompt, tokens, None, logprobs)
    engine.close()


@asynccontextmanager
async def serving(folder: Path, rig: Rig, **settings: Any) -> AsyncIterator[Client]:
    """A worker with that model and a gateway, over real sockets."""
    values = {
        "model": str(folder),
        "model_name": "small",
        "dtype": "float32",
        "kv_cache_mib": 1,
        "block_size": BLOCK,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "swap_mib": 0,
        "threads": 1,
        "listen": "127.0.0.1:0",
        "metrics_listen": "",
        "TIDEGATE_FLEET_KEY": FLEET_KEY,
        "worker_id": "small",
    }
    gateway = await rig.gateway()
    values["gateways"] = f"127.0.0.1:{gateway.port}"
    stop = asyncio.Event()
    worker = asyncio.create_task(Worker(WorkerSettings.model_validate(values | settings)).run(stop))
    try:
        await (await rig.client(gateway)).wait_serving()
        async with Client(f"127.0.0.1:{gateway.port}", "key-acme") as client:
            yield client
    finally:
        stop.set()
        await worker


@pytest.fixture
async def rig(redis_url: str, pool: str) -> AsyncIterator[Rig]:
    async with Rig(redis_url, pool) as rig:
        yield rig


@pytest.mark.timeout(240)
async def test_a_conversation_longer_than_the_pool_goes_on_in_its_window(families: dict[str, Family], rig: Rig) -> None:
    """1 MiB holds 512 tokens. Without a window the third turn could not begin; one wider than the model is refused."""
    model = families["llama"].model
    window = Window(64, 4)
    wish = Sampling(temperature=0, max_tokens=40, ignore_eos=True, kv_window_tokens=64)
    turn = torch.randint(3, 320, (200,), generator=torch.Generator().manual_seed(7)).tolist()
    async with serving(families["llama"].folder, rig) as client:
        said: list[int] = []
        for _ in range(4):
            said += turn
            answer = await client.complete(Tokens(said), wish, return_token_ids=True, timeout_s=120)
            assert len(answer.token_ids) == 40
            check_greedy(model, said, answer.token_ids, window)
            said += answer.token_ids
        assert answer.usage.cached_prompt_tokens >= len(said) - 40 - len(turn) - BLOCK
        assert len(said) == 960
        with pytest.raises(ClientError) as caught:
            await client.complete(Tokens(said), Sampling(max_tokens=8), timeout_s=60)
        assert caught.value.reason is Reason.NEVER_FITS
        with pytest.raises(ClientError, match="must be 1 to 1024") as caught:
            await client.complete(Tokens(said), Sampling(kv_window_tokens=1025), timeout_s=60)
        assert caught.value.status == "INVALID_ARGUMENT"
        assert [violation.field for violation in caught.value.fields] == ["sampling.kv_window_tokens"]


@pytest.mark.timeout(240)
async def test_a_model_with_windows_in_some_layers_is_served(families: dict[str, Family], rig: Rig) -> None:
    """1 MiB holds 1024 tokens of half of the layers: 600 of the global ones, and the local ones' windows."""
    prompt = torch.randint(3, 320, (600,), generator=torch.Generator().manual_seed(8)).tolist()
    async with serving(families["gemma3_text"].folder, rig) as client:
        for wish, window in (
            (Sampling(temperature=0, max_tokens=30, ignore_eos=True), None),
            (Sampling(temperature=0, max_tokens=30, ignore_eos=True, kv_window_tokens=50), Window(50, 4)),
        ):
            for _ in range(2):
                answer = await client.complete(Tokens(prompt), wish, return_token_ids=True, timeout_s=120)
                check_greedy(families["gemma3_text"].model, prompt, answer.token_ids, window)
            assert answer.usage.cached_prompt_tokens == 592
