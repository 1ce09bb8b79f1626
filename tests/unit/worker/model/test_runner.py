"""The runner's logits depend on a request's own tokens only: not on chunks, neighbours, blocks or order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.types import Band, SamplingParams
from worker.cache.storage import KVLayout
from worker.engine.batch import Batch, BatchRow, SampledToken
from worker.engine.executor import SamplingError
from worker.engine.request import Request
from worker.kernels import load_backend
from worker.model.config import ModelConfig, RopeScaling
from worker.model.runner import ModelRunner, TokenSampler

CONFIG = ModelConfig(
    name="tiny",
    vocab_size=100,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
VARIANTS = {
    "plain": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "biases": replace(CONFIG, attention_bias=True, o_bias=True),
    "qk_norm": replace(CONFIG, qk_norm=True),
    "window": replace(CONFIG, layer_windows=(20,) * CONFIG.num_layers),
    "yarn": replace(CONFIG, rope_scaling=RopeScaling("yarn", 4.0, 128)),
}
DTYPES = (torch.float32, torch.bfloat16)


class Greedy:
    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        return [SampledToken(int(token)) for token in logits.argmax(-1)]


def weights(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return drawn

    def vector(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {"embed": matrix(config.vocab_size, hidden) * 5, "norm": vector(hidden)}
    if not config.tie_embeddings:
        found["lm_head"] = matrix(config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        found |= {f"layers.{i}.{name}": matrix(*shape) for name, shape in shapes.items()}
        found |= {f"layers.{i}.{name}": vector(hidden) for name in ("attn_norm", "mlp_norm")}
        found |= {f"layers.{i}.{name}_norm": vector(config.head_dim) for name in "qk" if config.qk_norm}
        found |= {f"layers.{i}.{name}_bias": vector(shapes[name][0]) for name in "qkv" if config.attention_bias}
        found |= {f"layers.{i}.o_bias": vector(hidden) for _ in range(config.o_bias)}
    return found


def make_runner(
    config: ModelConfig = CONFIG,
    backend: str = "cpu",
    dtype: torch.dtype = torch.float32,
    block_size: int = 8,
    sampler: TokenSampler | None = None,
) -> ModelRunner:
    return ModelRunner(
        config,
        weights(config),
        backend=load_backend(backend),
        dtype=dtype,
        num_blocks=160,
        block_size=block_size,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        sampler=sampler or Greedy(),
        num_threads=2,
    )


def make_request(tokens: Sequence[int], slot: int, block_ids: Sequence[int]) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=8, temperature=0.0)
    return Request(
        f"r{slot}", 0, 0, list(tokens), len(tokens), sampling, Band.NORMAL, "", 0, block_ids=list(block_ids), slot=slot
    )


def step(runner: ModelRunner, *rows: tuple[Request, int]) -> Tensor:
    logits = runner.compute(Batch(tuple(BatchRow(request, count) for request, count in rows))).clone()
    for request, count in rows:
        request.num_computed += count
    return logits


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=length)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(variant: str, dtype: torch.dtype) -> None:
    logits = []
    for backend in ("cpu", "reference"):
        runner = make_runner(VARIANTS[variant], backend, dtype)
        request = make_request(prompt(150), 3, range(20, 40))
        step(runner, (request, 133))
        logits.append(step(runner, (request, 17)))
        runner.close()
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    assert float((logits[0] - logits[1]).abs().max()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 24, 64])
def test_chunks_neighbours_and_order_change_nothing(dtype: torch.dtype, block_size: int) -> None:
    runner = make_runner(dtype=dtype, block_size=block_size)
    prompts = [prompt(length, length) for length in (1, 15, 16, 17, 90, 150)]
    per = -(-160 // block_size)
    alone = []
    for tokens in prompts:
        request = make_request(tokens, 0, range(per))
        alone.append(step(runner, (request, len(tokens)))[0])
    dice = random.Random(block_size)
    blocks = list(range(160))
    dice.shuffle(blocks)
    requests = [
        make_request(tokens, slot, blocks[slot * per : (slot + 1) * per]) for slot, tokens in enumerate(prompts)
    ]
    results: dict[str, Tensor] = {}
    while len(results) < len(requests):
        left = [r for r in requests if r.num_computed < r.num_tokens]
        rows = [(r, min(r.num_tokens - r.num_computed, dice.choice([1, 2, 31, 64]))) for r in left]
        dice.shuffle(rows)
        finishing = [r.request_id for r, count in rows if r.num_computed + count == r.num_tokens]
        results |= zip(finishing, step(runner, *rows), strict=True)
    for request, want in zip(requests, alone, strict=True):
        assert torch.equal(results[request.request_id], want)
    runner.close()


def test_a_decode_equals_the_prefill_that_replaces_it() -> None:
    runner = make_runner(dtype=torch.bfloat16)
    request = make_request(prompt(300), 0, range(38))
    step(runner, (request, 200))
    for _ in range(99):
        step(runner, (request, 1))
    decoded = step(runner, (request, 1))
    again = make_request(request.token_ids, 1, range(50, 88))
    step(runner, (again, 256))
    assert torch.equal(step(runner, (again, 44)), decoded)
    runner.close()


def test_execute_samples_only_where_a_row_asks() -> None:
    runner = make_runner()
    runner.warm_up()
    first, second = make_request(prompt(9), 0, range(4)), make_request(prompt(5, 1), 5, range(8, 12))
    result = runner.execute(Batch((BatchRow(first, 4), BatchRow(second, 5))))
    assert result[0] is None
    assert result[1] is not None
    assert runner.execute(Batch((BatchRow(first, 4),))) == [None]
    assert (first.num_computed, second.num_tokens) == (0, 5)
    assert (runner.block_size, runner.num_blocks) == (8, 160)
    runner.close()


class Refusing:
    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        raise SamplingError({1: "not a number"})


def test_a_row_without_a_token_is_named_by_its_place_in_the_batch() -> None:
    runner = make_runner(sampler=Refusing())
    requests = [make_request(prompt(9, slot), slot, range(4 * slot, 4 * slot + 4)) for slot in range(3)]
    rows = [BatchRow(requests[0], 4), BatchRow(requests[1], 9), BatchRow(requests[2], 9)]  # the first only prefills
    with pytest.raises(SamplingError) as caught:
        runner.execute(Batch(tuple(rows)))
    assert caught.value.messages == {2: "not a number"}
    runner.close()


def test_limits_are_named() -> None:
    with pytest.raises(ValueError, match="block_size is 12"):
        make_runner(block_size=12)
    with pytest.raises(ValueError, match="evenly"):
        make_runner(replace(CONFIG, num_kv_heads=3))
    layout = KVLayout(30, 3, 64, 16, torch.bfloat16)
    assert layout.block_bytes == 30 * 2 * 3 * 64 * 16 * 2
    assert layout.num_blocks_in(100) == 100 * 1024 * 1024 // layout.block_bytes
    with pytest.raises(ValueError, match="kv_cache_mib is 0"):
        layout.num_blocks_in(0)


def test_blocks_copied_elsewhere_serve_as_well() -> None:
    runner = make_runner(dtype=torch.bfloat16)
    request = make_request(prompt(40), 0, range(5))
    step(runner, (request, 39))
    moved = make_request(request.token_ids, 1, [9, 8, 7, 6, 10])
    moved.num_computed = 39
    for old, new in zip(request.block_ids, moved.block_ids, strict=True):
        runner.storage.block(new).copy_(runner.storage.block(old))
    assert torch.equal(step(runner, (moved, 1)), step(runner, (request, 1)))
    runner.close()
