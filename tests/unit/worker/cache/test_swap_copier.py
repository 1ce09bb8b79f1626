"""The copier moves whole blocks, in time; and a real model's answers are the same after their blocks have moved."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from common.types import FinishReason, ModelLimits, PositionLogprobs, SamplingParams
from common.window import Window
from tests.unit.worker.model.test_runner import CONFIG, weights
from worker.cache.block import keyed_digest
from worker.cache.host import Copy, CopyOrders, HostTier
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.cache.storage import KVLayout, KVStorage
from worker.cache.swap import BlockCopier, make_copier
from worker.engine.engine import Engine
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.kernels import load_backend
from worker.model.runner import ModelRunner
from worker.model.sampler import Sampler

BLOCK = 8
SESSION = 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def storage() -> KVStorage:
    storage = KVStorage(KVLayout(2, 1, 16, BLOCK, torch.bfloat16), 8)
    for block_id in range(8):
        storage.block(block_id).fill_(block_id)
    return storage


@pytest.fixture
def copier(storage: KVStorage) -> Iterator[BlockCopier]:
    copier = BlockCopier(storage, 4)
    yield copier
    copier.close()


def test_a_block_goes_out_and_comes_back_elsewhere(storage: KVStorage, copier: BlockCopier) -> None:
    copier.begin(CopyOrders(saves=[Copy(3, 2)], loads=[Copy(5, 2)]))
    assert torch.equal(storage.block(5), storage.block(3))
    assert float(storage.block(4)[0]) == 4


def test_what_is_awaited_is_copied_before_the_rest(storage: KVStorage, copier: BlockCopier) -> None:
    copier.begin(CopyOrders(aside=[Copy(1, 0), Copy(2, 1)]))
    copier.begin(CopyOrders(awaited=[Copy(1, 0)], loads=[Copy(6, 0)]))
    assert float(storage.block(6)[0]) == 1
    assert copier.finished(wait=True) == [Copy(1, 0), Copy(2, 1)]
    copier.begin(CopyOrders(loads=[Copy(7, 1)]))
    assert float(storage.block(7)[0]) == 2
    assert copier.finished(wait=False) == []


def test_a_slot_is_given_away_behind_the_copy_that_is_awaited(storage: KVStorage, copier: BlockCopier) -> None:
    copier.begin(CopyOrders(aside=[Copy(1, 0), Copy(2, 1)]))
    copier.begin(CopyOrders(awaited=[Copy(1, 0), Copy(2, 1)], saves=[Copy(3, 0)], aside=[Copy(4, 1)]))
    assert copier.finished(wait=True) == [Copy(1, 0), Copy(2, 1), Copy(4, 1)]
    copier.begin(CopyOrders(loads=[Copy(6, 0), Copy(7, 1)]))
    assert [float(storage.block(block_id)[0]) for block_id in (6, 7)] == [3, 4]


def test_the_speed_is_measured(storage: KVStorage) -> None:
    ticks = iter(float(2**n) for n in range(100))
    copier = BlockCopier(storage, 4, lambda: next(ticks))
    assert copier.block_s == 1  # the fastest of three: 1, 4, 16
    copier.begin(CopyOrders(saves=[Copy(1, 0), Copy(2, 1)]))  # 64 s for 2
    assert copier.block_s == 1 + (32 - 1) / 16
    copier.close()


def test_host_memory_is_bounded(storage: KVStorage) -> None:
    assert make_copier(storage, 0) is None
    copier = make_copier(storage, 1)
    assert copier is not None
    assert copier.num_slots == 1024 * 1024 // storage.layout.block_bytes
    copier.close()
    with pytest.raises(ValueError, match="num_slots is 0"):
        BlockCopier(storage, 0)


Answer = tuple[list[int], list[PositionLogprobs], FinishReason | None]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "penalties": {"temperature": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    "stops": {"temperature": 1.0, "seed": 3, "stop_token_ids": tuple(range(0, 100, 9)), "min_tokens": 12},
    "ends": {"temperature": 1.2, "seed": 11},
}


def answer_all(runner: ModelRunner, *, host: bool, dice: random.Random | None) -> tuple[dict[str, Answer], list[int]]:
    """The answers to five requests, and the tokens (preempted, recomputed, loaded); with dice, running requests are
    preempted at random, and their blocks taken."""
    pool = BlockPool(runner.num_blocks)
    copier = BlockCopier(runner.storage, 40) if host else None
    manager = CacheManager(
        pool,
        BLOCK,
        keyed_digest(b""),
        windows=runner.windows,
        max_chunk_tokens=16,
        # Whatever computing takes, copying takes less: every preempted request is swapped.
        host=HostTier(pool, copier.num_slots, lambda: -1.0) if copier else None,
    )
    scheduler = Scheduler(manager, SchedulerConfig(3, 32, 16))
    limits = ModelLimits("tiny", 256, CONFIG.vocab_size, BLOCK, pool.num_usable, 3, runner.windows)
    engine = Engine(runner, scheduler, manager, limits, [0], copier=copier)
    engine.open_session(SESSION)
    answers: dict[str, Answer] = {}
    for index, (name, kind) in enumerate(KINDS.items()):
        prompt = [5] * 9 + random.Random(index).choices(range(1, 100), k=6 + index)
        params = SamplingParams(**({"seed": 1, "max_tokens": 30, "logprobs": 2} | kind))
        engine.submit(SESSION, name, 1, prompt, params)
        answers[name] = ([], [], None)
    counts = [0, 0, 0]
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        counts[1] += output.stats.num_recomputed_tokens
        counts[2] += output.stats.num_loaded_tokens
        for event in output.sessions[SESSION].outputs if SESSION in output.sessions else ():
            tokens, logprobs, _ = answers[event.request_id]
            answers[event.request_id] = ([*tokens, *event.token_ids], [*logprobs, *event.logprobs], event.finish_reason)
        if dice is not None and scheduler.running and dice.random() < 0.25:
            victim = dice.choice(scheduler.running)
            counts[0] += victim.num_computed
            scheduler.preempt(victim)
            taken = [manager._take() for _ in range(pool.num_free - dice.randint(0, 3))]
            for block_id in taken:
                pool.release(block_id)
    if copier is not None:
        copier.close()
    return answers, counts


def make_runner(backend: str, window: Window | None) -> ModelRunner:
    return ModelRunner(
        CONFIG,
        weights(CONFIG),
        backend=load_backend(backend),
        dtype=torch.float32,
        num_blocks=24,
        block_size=BLOCK,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        sampler=Sampler(CONFIG.vocab_size, [0]),
        window=window,
        num_threads=1,
    )


def values(answers: dict[str, Answer]) -> dict[str, Sequence[Any]]:
    return {name: (tokens, reason) for name, (tokens, _, reason) in answers.items()}


@pytest.mark.parametrize(
    ("backend", "window"), [("cpu", None), ("cpu", Window(12, 2)), ("reference", None), ("reference", Window(12, 2))]
)
def test_a_models_answers_do_not_depend_on_where_its_blocks_have_been(backend: str, window: Window | None) -> None:
    """Tokens, log probabilities, seeds, penalties and stops, undisturbed, recomputed and swapped."""
    runner = make_runner(backend, window)
    undisturbed, _ = answer_all(runner, host=False, dice=None)
    lengths = {name: len(tokens) for name, (tokens, _, _) in undisturbed.items()}
    assert lengths["greedy"] == 30
    assert 12 < lengths["stops"] < 30
    loaded = 0
    for seed in range(4 if backend == "cpu" else 1):
        recomputed, _ = answer_all(runner, host=False, dice=random.Random(seed))
        swapped, counts = answer_all(runner, host=True, dice=random.Random(seed))
        loaded += counts[2]
        for answers in (recomputed, swapped):
            assert values(answers) == values(undisturbed)
            for name, (_, logprobs, _) in answers.items():
                for got, want in zip(logprobs, undisturbed[name][1], strict=True):
                    assert [each.token_id for each in got.top] == [each.token_id for each in want.top]
                    if backend == "cpu":  # bit for bit; torch's products depend on the neighbours
                        assert got == want
                    assert got.sampled.logprob == pytest.approx(want.sampled.logprob, abs=1e-4)
    assert loaded > 0
    runner.close()
