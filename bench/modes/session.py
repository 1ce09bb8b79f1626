"""The real model on this machine, ready to be measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.in_process import EngineOptions, build_runner
from bench.levels import RealMachine
from common.default_model import DefaultModelError, ensure_default_model
from common.types import ModelLimits
from worker.model.dtype import choose_dtype
from worker.model.loaded_model import ModelLoadError
from worker.model.weights import load_model


class OpenError(Exception):
    """The model cannot be had or loaded; the message says why."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A machine whose pool all trials use in turn, and what a result must state of it."""

    machine: RealMachine
    limits: ModelLimits
    facts: dict[str, object]


def open_model(
    path: Path | None,
    dtype: str,
    kv_cache_mib: int,
    max_num_seqs: int,
    num_threads: int,
    console: Console,
    *,
    block_size: int = 16,
    max_num_batched_tokens: int = 512,
) -> OpenModel:
    """Loads, packs and warms up; no path is the default model.

    Raises OpenError, and ValueError for an unknown dtype.
    """
    start = time.monotonic()
    options = EngineOptions(
        dtype=choose_dtype(dtype),
        kv_cache_mib=kv_cache_mib,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
    )
    try:
        model = load_model(path or ensure_default_model(on_progress=console.print), options.dtype)
    except (DefaultModelError, ModelLoadError, OSError) as error:
        raise OpenError(str(error)) from error
    runner = build_runner(model, options)
    model.tensors.clear()
    runner.warm_up()
    console.print(f"{model.config.name} is warm after {time.monotonic() - start:.1f} s", highlight=False)
    num_usable = runner.num_blocks - 1  # one is the null block
    limits = ModelLimits(
        model=model.config.name,
        context_length=model.config.max_positions,
        vocab_size=model.config.vocab_size,
        block_size=block_size,
        num_blocks=num_usable,
        max_num_seqs=max_num_seqs,
    )
    facts: dict[str, object] = {
        "model_id": model.config.name,
        "dtype": str(options.dtype).removeprefix("torch."),
        "backend": options.backend,
        "kv_cache_mib": kv_cache_mib,
        "num_blocks": num_usable,
        "block_size": block_size,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "num_threads": num_threads,
    }
    return OpenModel(RealMachine(runner), limits, facts)
