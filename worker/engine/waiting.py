"""The requests that wait, by arrival; nothing but a merge of returning and fresh ones is linear."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice

from worker.engine.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class WaitingList:
    """Fresh requests come in order of arrival and are kept in a linked dictionary; the few preempted ones return to
    the place of their own arrival. The first ones, adding and removing cost the same however many wait."""

    def __init__(self) -> None:
        self._fresh: OrderedDict[int, Request] = OrderedDict()  # by arrival
        self._preempted: list[Request] = []  # by arrival

    def __len__(self) -> int:
        return len(self._fresh) + len(self._preempted)

    def __iter__(self) -> Iterator[Request]:
        """By arrival; nothing may be added or removed meanwhile."""
        return merge(self._preempted, self._fresh.values(), key=_arrival)

    @property
    def preempted(self) -> Sequence[Request]:
        """Those that were running before, by arrival."""
        return self._preempted

    @property
    def num_returning(self) -> int:
        """Those that were running before and want to go on."""
        return sum(not request.is_paused for request in self._preempted)

    @property
    def is_idle(self) -> bool:
        """Whether nobody wants to run."""
        return all(request.is_paused for request in self)

    def first(self, count: int) -> list[Request]:
        """The first ones by arrival that want to run, `count` at most."""
        return list(islice((request for request in self if not request.is_paused), count))

    def add(self, request: Request) -> None:
        """Takes a request. Raises ValueError if a fresh one arrived before one that is here."""
        if request.num_preemptions:
            insort(self._preempted, request, key=_arrival)
            return
        if self._fresh and next(reversed(self._fresh)) >= request.arrival:
            raise ValueError(f"{request} arrived before another that waits already")
        self._fresh[request.arrival] = request

    def remove(self, request: Request) -> None:
        """Takes a request out. Raises KeyError if it is not here."""
        if not request.num_preemptions:
            del self._fresh[request.arrival]
            return
        index = bisect_left(self._preempted, request.arrival, key=_arrival)
        if index == len(self._preempted) or self._preempted[index] is not request:
            raise KeyError(f"{request} does not wait")
        del self._preempted[index]
