"""Copies KV blocks between the cache and host memory: before a step what it needs, beside it what can wait."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from worker.cache.host import Copy, CopyOrders
from worker.cache.storage import KVStorage

_MIB = 1024 * 1024
_PROBES = 3
_MEMORY = 16
"""Copies that the measured speed looks back on."""


class BlockCopier:
    """A `Copier` over a KV storage; owns the host memory, and one thread for the copies beside steps.

    The system gives the host memory page by page, as blocks are saved.
    """

    def __init__(self, storage: KVStorage, num_slots: int, now: Callable[[], float] = time.perf_counter) -> None:
        """Measures a few copies of the null block; call it when no step runs."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, at least 1 is needed")
        self._storage = storage
        self._now = now
        self._host = torch.empty(num_slots, storage.layout.block_elements, dtype=storage.layout.dtype)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swap")
        self._aside: deque[tuple[Sequence[Copy], Future[float]]] = deque()  # in order of their ends
        self._block_s = min(self._save([Copy(0, 0)]) for _ in range(_PROBES))

    @property
    def num_slots(self) -> int:
        """See `Copier.num_slots`."""
        return len(self._host)

    @property
    def block_s(self) -> float:
        """See `Copier.block_s`."""
        return self._block_s

    def begin(self, orders: CopyOrders) -> None:
        """See `Copier.begin`."""
        awaited = set(orders.awaited)
        for copies, future in self._aside:
            if not awaited.isdisjoint(copies):
                future.result()
        if orders.saves:
            self._learn(self._save(orders.saves))
        if orders.loads:
            self._learn(self._load(orders.loads))
        if orders.aside:
            self._aside.append((orders.aside, self._thread.submit(self._save, orders.aside)))

    def finished(self, *, wait: bool) -> list[Copy]:
        """See `Copier.finished`."""
        done: list[Copy] = []
        while self._aside and (wait or self._aside[0][1].done()):
            copies, future = self._aside.popleft()
            self._learn(future.result())
            done += copies
        return done

    def close(self) -> None:
        """Ends the thread after what it copies."""
        self._thread.shutdown()

    def _save(self, copies: Sequence[Copy]) -> float:
        """Copies blocks to the host; seconds per block."""
        started = self._now()
        for block_id, slot in copies:
            _copy(self._host[slot], self._storage.block(block_id))
        return (self._now() - started) / len(copies)

    def _load(self, copies: Sequence[Copy]) -> float:
        """Copies blocks from the host; seconds per block."""
        started = self._now()
        for block_id, slot in copies:
            _copy(self._storage.block(block_id), self._host[slot])
        return (self._now() - started) / len(copies)

    def _learn(self, block_s: float) -> None:
        self._block_s += (block_s - self._block_s) / _MEMORY


def _copy(target: Tensor, source: Tensor) -> None:
    """All bytes of a contiguous tensor in main memory, on this thread: torch wakes its others, which takes longer."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def make_copier(storage: KVStorage, swap_mib: int) -> BlockCopier | None:
    """A copier with as many slots as fit into `swap_mib` MiB; None if not one does."""
    num_slots = swap_mib * _MIB // storage.layout.block_bytes
    return BlockCopier(storage, num_slots) if num_slots else None
