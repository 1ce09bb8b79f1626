"""The second tier of the prefix cache: which blocks of preempted requests lie in host memory, and when they move."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from worker.cache.block import Block, BlockKey
from worker.cache.pool import BlockPool, IntegrityError

AHEAD = 32
"""Blocks that are saved on the side before anybody takes them, so that whoever does need not wait."""


class Copy(NamedTuple):
    """One whole block between the pool and the host."""

    block_id: int
    slot: int


class HostHit(NamedTuple):
    """A block that is not in the pool, and is in the host."""

    key: BlockKey
    slot: int


@dataclass(slots=True)
class CopyOrders:
    """What a step needs copied, in this order: the awaited and the saves, the loads, then the rest beside the step."""

    awaited: list[Copy] = field(default_factory=list)  # begun on the side by an earlier step; the block is overwritten
    saves: list[Copy] = field(default_factory=list)  # pool to host, before the step: the block is overwritten
    loads: list[Copy] = field(default_factory=list)  # host to pool, before the step: the block is read
    aside: list[Copy] = field(default_factory=list)  # pool to host, while the step runs or later

    @property
    def num_saved(self) -> int:
        """Blocks that move to the host."""
        return len(self.saves) + len(self.aside)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.awaited or self.saves or self.loads or self.aside)


class Copier(Protocol):
    """Copies whole blocks between the KV cache and host memory."""

    @property
    def num_slots(self) -> int:
        """Blocks that the host memory holds."""
        ...

    @property
    def block_s(self) -> float:
        """Seconds that copying one block takes, as measured."""
        ...

    def begin(self, orders: CopyOrders) -> None:
        """Returns when all but `aside` is copied; the engine's next batch may be executed then."""
        ...

    def finished(self, *, wait: bool) -> list[Copy]:
        """The `aside` copies that were completed since the last call; with `wait`, all that were begun."""
        ...


class HostTier:
    """Keeps the books over the host's slots.

    A preempted request claims the blocks that it alone held. They stay in the pool, cached, and are saved when somebody
    takes them, or on the side when they are next in line: so only blocks that are needed move. Slots that are claimed
    stay; others are given away, the least recently used first. A request whose blocks find no room is computed again.
    """

    def __init__(self, pool: BlockPool, num_slots: int, block_s: Callable[[], float]) -> None:
        """`block_s` tells what copying a block takes at present."""
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, at least 1 is needed")
        self._pool = pool
        self._num_slots = num_slots
        self._block_s = block_s
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[BlockKey, int] = {}
        self._idle: OrderedDict[BlockKey, None] = OrderedDict()  # complete and unclaimed: to be given away
        self._claims: dict[int, list[BlockKey]] = {}  # by the arrival of the request that waits
        self._claimed: dict[BlockKey, int] = {}  # how many wait for it
        self._wanted: OrderedDict[int, BlockKey] = OrderedDict()  # blocks to save, next to be evicted first
        self._saving: dict[int, BlockKey] = {}  # blocks that are copied on the side
        self._loading: list[BlockKey] = []  # by the step that is being scheduled
        self._orders = CopyOrders()

    def keep(self, arrival: int, blocks: Sequence[Block], recompute_s: float) -> bool:
        """Claims full blocks for a request that is preempted, in order of its tokens; returns whether it did.

        Not if computing them again takes less time than copying them both ways, or if others' claims leave no room.
        """
        keys = [block.key for block in blocks if block.key is not None]
        missing = [key for key in keys if key not in self._slots]
        num_new = sum(key not in self._claimed for key in keys)
        if not keys or (len(missing) + len(keys)) * self._block_s() >= recompute_s:
            return False
        if len(self._claimed) + num_new > self._num_slots:
            return False
        self._claims[arrival] = keys
        for key in keys:
            self._claimed[key] = self._claimed.get(key, 0) + 1
            self._idle.pop(key, None)
        for block in reversed(blocks):  # the tail is evicted first
            if block.key is not None and block.key not in self._slots:
                self._wanted[block.block_id] = block.key
        return True

    def release(self, arrival: int) -> None:
        """Gives up a request's claims: it is back, or gone. What was saved stays until the room is needed."""
        for key in self._claims.pop(arrival, ()):
            self._claimed[key] -= 1
            if not self._claimed[key]:
                del self._claimed[key]
                if key in self._slots and not self._is_busy(key):
                    self._idle[key] = None

    def find(self, key: BlockKey) -> HostHit | None:
        """Where this very content lies, if its copy is complete. Changes nothing."""
        slot = self._slots.get(key)
        return None if slot is None or key in self._saving.values() else HostHit(key, slot)

    def hold(self, hits: Iterable[HostHit]) -> None:
        """Keeps the slots of these hits until the step's orders are taken."""
        for hit in hits:
            self._idle.pop(hit.key, None)
            self._loading.append(hit.key)

    def load(self, hit: HostHit, block_id: int) -> None:
        """Orders that a block is filled before the step; the hit is being held."""
        self._orders.loads.append(Copy(block_id, hit.slot))

    def before_take(self, block: Block) -> None:
        """Orders what must be copied before a free block is overwritten; to be called before it is taken."""
        key = self._saving.pop(block.block_id, None)
        if key is not None:
            self._orders.awaited.append(Copy(block.block_id, self._slots[key]))
            self._complete(block, key)
        wanted = self._wanted.pop(block.block_id, None)
        if wanted is not None and wanted == block.key and wanted in self._claimed and wanted not in self._slots:
            slot = self._take_slot(wanted)
            if slot is not None:
                self._orders.saves.append(Copy(block.block_id, slot))

    def take_orders(self) -> CopyOrders:
        """What is to be copied for the step that was just scheduled, and beside it."""
        self._look_ahead()
        for key in self._loading:
            self._settle(key)
        self._loading.clear()
        orders, self._orders = self._orders, CopyOrders()
        return orders

    def complete(self, copies: Iterable[Copy]) -> None:
        """Learns which copies on the side are done; those that were awaited meanwhile are known already."""
        for copy in copies:
            key = self._saving.get(copy.block_id)
            if key is not None and self._slots[key] == copy.slot:
                del self._saving[copy.block_id]
                self._complete(self._pool.blocks[copy.block_id], key)

    def check_integrity(self) -> None:
        """Audits the slots. Raises IntegrityError with what is wrong."""
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(self._num_slots)):
            raise IntegrityError(f"slots in use and free are {slots}")
        counted: dict[BlockKey, int] = {}
        for keys in self._claims.values():
            for key in keys:
                counted[key] = counted.get(key, 0) + 1
        if counted != self._claimed or len(counted) > self._num_slots:
            raise IntegrityError(f"{len(self._claimed)} blocks are claimed, {len(counted)} by requests")
        busy = {key for key in self._slots if key in self._claimed or self._is_busy(key)}
        if busy | self._idle.keys() != self._slots.keys() or busy & self._idle.keys():
            raise IntegrityError("a slot is neither idle nor needed, or both")
        copying = {block.block_id for block in self._pool.blocks if block.is_copying}
        if copying != self._saving.keys():
            raise IntegrityError(f"blocks {copying} are being copied, {self._saving.keys()} are known to be")

    def _look_ahead(self) -> None:
        """Orders copies on the side while the free blocks that need none are few."""
        while self._wanted and self._pool.num_free - len(self._wanted) < AHEAD:
            block_id, key = self._wanted.popitem(last=False)
            block = self._pool.blocks[block_id]
            if block.key != key or key not in self._claimed or key in self._slots:
                continue
            slot = self._take_slot(key)
            if slot is None:
                continue
            self._saving[block_id] = key
            self._pool.begin_copy(block)
            self._orders.aside.append(Copy(block_id, slot))

    def _take_slot(self, key: BlockKey) -> int | None:
        """A slot for a block, another one's if need be; None if all are needed."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            last, _ = self._idle.popitem(last=False)
            slot = self._slots.pop(last)
        else:
            return None
        self._slots[key] = slot
        return slot

    def _complete(self, block: Block, key: BlockKey) -> None:
        self._pool.end_copy(block)
        self._settle(key)

    def _settle(self, key: BlockKey) -> None:
        """Makes a slot that nobody needs any more the last in line to be given away."""
        if key in self._slots and key not in self._claimed and key not in self._saving.values():
            self._idle[key] = None
            self._idle.move_to_end(key)

    def _is_busy(self, key: BlockKey) -> bool:
        return key in self._loading or key in self._saving.values()
