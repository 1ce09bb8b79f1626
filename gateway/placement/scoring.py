"""Which workers are believed to have a prompt's beginning cached; no I/O."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.types import ModelLimits

MAX_BLOCKS = 2048
"""Leading blocks of a prompt that are looked at: naming more takes time, and little is shared so far behind."""


class Prefix:
    """The leading full blocks of a sequence, each named by a number that stands for it and all before it.

    The names come from Python's own hash, which is keyed anew in every process, so they mean something in this one
    only and nobody outside can choose two sequences with equal ones. If two are equal by chance, a request goes to a
    worker that has nothing of it: the workers compare tokens.
    """

    def __init__(self, token_ids: Sequence[int], salt: str) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._names: dict[int, tuple[int, ...]] = {}

    def names(self, block_size: int) -> tuple[int, ...]:
        """One for each block of so many tokens that a later request could find; at least one token stays to compute."""
        names = self._names.get(block_size)
        if names is None:
            names = self._names[block_size] = self._make(block_size)
        return names

    def _make(self, block_size: int) -> tuple[int, ...]:
        num_blocks = min((len(self._token_ids) - 1) // block_size, MAX_BLOCKS)
        packed = array("I", self._token_ids[: num_blocks * block_size]).tobytes()
        num_bytes = len(packed) // num_blocks if num_blocks else 1
        name, names = hash(self._salt), []
        for start in range(0, len(packed), num_bytes):
            name = hash((name, packed[start : start + num_bytes]))
            names.append(name)
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Belief:
    """What was believed of a worker when a sequence was sent there."""

    worker_id: str
    epoch: int
    num_blocks: int  # of the sequence, cached there
    age: int  # when the last of these had been used before: smaller is longer ago; 0 if there was none


@dataclass(slots=True)
class _Cache:
    """One start of a worker. Blocks by their last use, oldest first, and the tail of a sequence before its head, as the
    worker evicts them: so if a block is here, all blocks before it are, too."""

    epoch: int
    limits: ModelLimits
    used_at: OrderedDict[int, int] = field(default_factory=OrderedDict)  # name -> age of its use

    def count(self, prefix: Prefix) -> int:
        names = prefix.names(self.limits.block_size)
        return bisect_left(names, True, key=lambda name: name not in self.used_at)


class CachedPrefixes:
    """What this gateway has sent where, as far as it may still be cached there.

    No worker is believed to have more blocks than its pool has for each block table. When a worker finds less than was
    believed, it has evicted what was not found, and hence all that had not been used since.
    """

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._clock = 0

    def __repr__(self) -> str:
        return f"CachedPrefixes({ {worker_id: len(cache.used_at) for worker_id, cache in self._caches.items()} })"

    def add(self, worker_id: str, epoch: int, limits: ModelLimits) -> None:
        """A worker can be sent to. Of an earlier start of it nothing is left."""
        known = self._caches.get(worker_id)
        if known is None or known.epoch != epoch:
            self._caches[worker_id] = _Cache(epoch, limits)

    def remove(self, worker_id: str, epoch: int) -> None:
        """A worker is gone."""
        if self._find(worker_id, epoch) is not None:
            del self._caches[worker_id]

    def believed(self, prefix: Prefix, workers: Iterable[str]) -> Mapping[str, int]:
        """Leading blocks of a sequence by worker, for those of `workers` that are believed to have any."""
        counts = {it: self._caches[it].count(prefix) for it in workers if it in self._caches}
        return {worker_id: count for worker_id, count in counts.items() if count}

    def note(self, worker_id: str, epoch: int, prefix: Prefix) -> Belief:
        """A sequence is computed there, so its blocks will be cached. Returns what was believed before."""
        cache = self._find(worker_id, epoch)
        if cache is None:
            return Belief(worker_id, epoch, 0, 0)
        used_at, names, count = cache.used_at, prefix.names(cache.limits.block_size), cache.count(prefix)
        belief = Belief(worker_id, epoch, count, used_at[names[count - 1]] if count else 0)
        self._clock += 1
        for name in reversed(names):
            used_at[name] = self._clock
            used_at.move_to_end(name)
        while len(used_at) > cache.limits.num_blocks // len(cache.limits.windows):
            used_at.popitem(last=False)
        return belief

    def correct(self, belief: Belief, num_found_tokens: int) -> None:
        """The worker has said how much of a sequence it found: if that is less than was believed, forgets what must
        have gone before that."""
        cache = self._find(belief.worker_id, belief.epoch)
        if cache is None or num_found_tokens >= belief.num_blocks * cache.limits.block_size:
            return
        used_at = cache.used_at
        while used_at and next(iter(used_at.values())) <= belief.age:
            used_at.popitem(last=False)

    def _find(self, worker_id: str, epoch: int) -> _Cache | None:
        cache = self._caches.get(worker_id)
        return cache if cache is not None and cache.epoch == epoch else None
