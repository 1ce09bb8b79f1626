"""An engine over a real model in this very process, without sessions, gateway or asyncio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.types import ModelLimits
from worker.cache.block import keyed_digest
from worker.cache.host import Copier, HostTier
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.cache.storage import KVLayout
from worker.engine.engine import Engine
from worker.engine.executor import Executor
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.kernels import BACKENDS, load_backend
from worker.model.loaded_model import LoadedModel
from worker.model.runner import ModelRunner
from worker.model.sampler import Sampler

SESSION = 1
"""The one session that an in-process engine has."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built; sizes as in the worker's settings."""

    dtype: torch.dtype = torch.float32
    backend: str = "cpu" if "cpu" in BACKENDS else "reference"
    num_blocks: int | None = None  # None: as many as fit into kv_cache_mib
    kv_cache_mib: int = 1024
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int | None = None  # None: the whole budget
    step_budget_s: float = 0.05  # counts only if the engine has a clock
    prefix_cache: bool = True
    num_threads: int = 2


def build_runner(
    model: LoadedModel, options: EngineOptions, runner_type: type[ModelRunner] = ModelRunner
) -> ModelRunner:
    """Packs the weights and allocates the KV pool; `model.tensors` may be dropped afterwards."""
    layout = KVLayout.of(model.config, options.block_size, options.dtype)
    return runner_type(
        model.config,
        model.tensors,
        backend=load_backend(options.backend),
        dtype=options.dtype,
        num_blocks=options.num_blocks or layout.num_blocks_in(options.kv_cache_mib),
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        sampler=Sampler(model.config.vocab_size, model.text.eos_token_ids),
        num_threads=options.num_threads,
    )


def build_engine(
    model: LoadedModel,
    runner: Executor,
    options: EngineOptions,
    make_scheduler: Callable[[CacheManager, SchedulerConfig], Scheduler] = Scheduler,
    now: Callable[[], float] | None = None,
    copier: Copier | None = None,
    copy_s: Callable[[], float] | None = None,
) -> tuple[Engine, CacheManager]:
    """A fresh engine, with an empty pool and one open session, over a runner that may have served others before.

    Without a clock, `now`, steps are bounded in tokens only and do not depend on the machine's speed. With a `copier`
    over the runner's storage, preempted requests are swapped out where that takes less time than computing them again;
    `copy_s` tells what copying a block takes, None as the copier measures it.
    """
    pool = BlockPool(runner.num_blocks)
    host = None
    if copier is not None:
        measured = copier  # the same, and never None
        host = HostTier(pool, measured.num_slots, copy_s or (lambda: measured.block_s))
    manager = CacheManager(pool, runner.block_size, keyed_digest(b""), prefix_cache=options.prefix_cache, host=host)
    scheduler = make_scheduler(
        manager,
        SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_chunk_tokens=options.max_chunk_tokens or options.max_num_batched_tokens,
            step_budget_s=options.step_budget_s,
        ),
    )
    limits = ModelLimits(
        model=model.config.name,
        context_length=model.config.max_positions,
        vocab_size=model.config.vocab_size,
        block_size=runner.block_size,
        num_blocks=manager.pool.num_usable,
        max_num_seqs=options.max_num_seqs,
    )
    engine = Engine(runner, scheduler, manager, limits, model.text.eos_token_ids, now, copier=copier)
    engine.open_session(SESSION)
    return engine, manager
