"""What a worker loads computes with threads of its own, and they end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from common.types import SamplingParams
from tests.support.models import random_model, save_folder
from worker.app import load_engine
from worker.config import WorkerSettings


def test_the_threads_of_kernels_and_copies_end_when_no_step_will_follow(tmp_path: Path) -> None:
    folder = save_folder(random_model("llama"), tmp_path / "m")
    before = set(threading.enumerate())
    closing: list[Callable[[], None]] = []
    settings = WorkerSettings(model=str(folder), dtype="float32", kv_cache_mib=2, swap_mib=1, threads=2)
    engine, _ = load_engine(settings, at_end=closing.append)
    engine.open_session(1)
    engine.submit(1, "r", 1, [5, 6, 7], SamplingParams(seed=0, max_tokens=4, ignore_eos=True))
    while engine.num_requests:
        engine.step()
    assert set(threading.enumerate()) - before
    for close in closing:
        close()
    assert not {thread for thread in set(threading.enumerate()) - before if thread.is_alive()}
