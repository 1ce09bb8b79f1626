"""A model behind a window: evicting what nobody sees changes no logit, and nothing of the null block is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.window import Window
from tests.unit.worker.model.test_runner import CONFIG, Greedy, make_request, prompt, step, weights
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.kernels import load_backend
from worker.model.runner import ModelRunner

WIDTH = 20
BLOCK = 8


def make_runner(backend: str, dtype: torch.dtype, window: Window | None, own: int | None = None) -> ModelRunner:
    config = replace(CONFIG, layer_windows=(own,) * CONFIG.num_layers)
    return ModelRunner(
        config,
        weights(config),
        backend=load_backend(backend),
        dtype=dtype,
        num_blocks=64,
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        sampler=Greedy(),
        window=window,
        num_threads=1,
    )


@pytest.mark.parametrize("sinks", [0, 3, 9])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("reference", torch.float32)]
)
def test_evicted_or_kept_the_logits_are_the_same(backend: str, dtype: torch.dtype, sinks: int) -> None:
    """One request keeps all its blocks, the other gives them back; lengths pass window - 1, window, window + 1."""
    window = Window(WIDTH, sinks)
    runner = make_runner(backend, dtype, window)
    for part in (runner.storage.layer(index) for index in range(CONFIG.num_layers)):
        part.keys[0], part.values[0] = torch.nan, torch.nan
    pool = BlockPool(32)
    manager = CacheManager(pool, BLOCK, keyed_digest(b""), windows=(window,), max_chunk_tokens=5, prefix_cache=False)
    tokens = prompt(100)
    kept, sliding = make_request(tokens, 0, range(40, 53)), make_request(tokens, 1, ())
    assert manager.admit(sliding)
    held = set()
    for count in [5, 5, 5, 4, 1, 1, 1, 3, 5, 5, 5] + [1] * 60:
        manager.slide([sliding])
        assert manager.cover(sliding, sliding.num_computed + count) >= sliding.num_computed + count
        together = step(runner, (kept, count), (sliding, count))  # logits of the last step only
        held.add(pool.counts.referenced)
    assert together.shape == (2, CONFIG.vocab_size)
    assert torch.isfinite(together).all()
    tolerance = 0.0 if backend == "cpu" else 1e-5  # torch's products of rows depend on their neighbours
    assert float((together[0] - together[1]).abs().max()) <= tolerance
    assert max(held) <= window.max_blocks(5, BLOCK) < len(kept.block_ids)
    runner.close()


def test_a_window_of_the_setting_equals_the_same_window_of_the_model() -> None:
    logits = []
    for window, own in ((Window(WIDTH), None), (None, WIDTH), (Window(WIDTH + 1), None), (None, None)):
        runner = make_runner("cpu", torch.float32, window, own)
        request = make_request(prompt(60), 0, range(1, 9))
        logits.append(step(runner, (request, 60)))
        runner.close()
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[3])
