"""The last requests that ended with an error at this gateway, for operators who are asked why."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.clock import Clock
from common.errors import TidegateError

_MAX_ID_LENGTH = 64 + 1 + 128  # tenant/request; what is longer has been refused for that


@dataclass(frozen=True, slots=True)
class Ending:
    """A request's error, and when it came (monotonic seconds)."""

    error: TidegateError
    at: float


class Endings:
    """Keeps so many; an id's later ending takes the place of its earlier one. A request without an id is not kept."""

    def __init__(self, clock: Clock, max_kept: int = 10_000) -> None:
        self._clock = clock
        self._max_kept = max_kept
        self._endings: OrderedDict[str, Ending] = OrderedDict()

    def __len__(self) -> int:
        return len(self._endings)

    def find(self, fleet_id: str) -> Ending | None:
        """How a request ended, if that was with an error, not long ago, here."""
        return self._endings.get(fleet_id)

    @contextmanager
    def noted(self, watched: WatchedCall) -> Iterator[None]:
        """Notes the error that leaves the block, or forgets the one of an earlier call if there is none."""
        try:
            yield
        except TidegateError as error:
            if 0 < len(watched.fleet_id) <= _MAX_ID_LENGTH:
                self._endings[watched.fleet_id] = Ending(error, self._clock.monotonic())
                self._endings.move_to_end(watched.fleet_id)
                if len(self._endings) > self._max_kept:
                    self._endings.popitem(last=False)
            raise
        else:
            self._endings.pop(watched.fleet_id, None)


@dataclass(slots=True)
class WatchedCall:
    """A call whose request may get its id only later; empty: it has none yet."""

    fleet_id: str
