"""The last requests that ended with an error at this gateway, for operators who are asked why."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from common.clock import Clock
from common.errors import DeadlineExceededError, TidegateError
from common.types import Reason

_MAX_MESSAGE_LENGTH = 1000
_ON_THE_WAY_S = 0.1
_MAX_UNTOLD = 1000  # in a flood the others hear of the latest
_MAX_ID_LENGTH = 128  # what is longer has been refused for that


@dataclass(frozen=True, slots=True)
class Ending:
    """A request's error, and when it came (monotonic seconds)."""

    tenant_id: str
    request_id: str  # empty: it never had one
    status: str  # name of the gRPC status
    reason: Reason
    message: str
    retry_after_s: float | None
    at: float


class Endings:
    """Keeps so many; an id's later ending takes the place of its earlier one."""

    def __init__(self, clock: Clock, max_kept: int = 10_000) -> None:
        self._clock = clock
        self._max_kept = max_kept
        self._endings: OrderedDict[str, Ending] = OrderedDict()  # by the id inside the fleet, or a number without one
        self._untold: OrderedDict[str, Ending | None] = OrderedDict()  # to other gateways; None: it ended well
        self._num_nameless = 0

    def __len__(self) -> int:
        return len(self._endings)

    def find(self, fleet_id: str) -> Ending | None:
        """How a request ended, if that was with an error, not long ago, here."""
        return self._endings.get(fleet_id)

    def latest(self, tenant_id: str, most: int) -> list[Ending]:
        """The last ones of a tenant, latest first."""
        of_tenant = (ending for ending in reversed(self._endings.values()) if ending.tenant_id == tenant_id)
        return list(islice(of_tenant, most))

    def take_untold(self) -> dict[str, Ending | None]:
        """What has changed since the last time, by id; None: it ended well after all."""
        untold, self._untold = self._untold, OrderedDict()
        return untold

    def give_back(self, untold: Mapping[str, Ending | None]) -> None:
        """They could not be told."""
        later = self.take_untold()
        for fleet_id, ending in (*untold.items(), *later.items()):
            self._tell(fleet_id, ending)

    def _tell(self, fleet_id: str, ending: Ending | None) -> None:
        self._untold[fleet_id] = ending
        self._untold.move_to_end(fleet_id)
        if len(self._untold) > _MAX_UNTOLD:
            self._untold.popitem(last=False)

    @contextmanager
    def noted(self, watched: WatchedCall) -> Iterator[None]:
        """Notes the error that leaves the block, or forgets the one of an earlier call if there is none."""
        may_have_ended_before = bool(watched.fleet_id)  # its client has named it
        try:
            yield
        except TidegateError as error:
            self._note(watched, error)
            raise
        except asyncio.CancelledError:
            # A client that gives up at its deadline may say so before the deadline has come here.
            if watched.deadline is not None and self._clock.monotonic() >= watched.deadline - _ON_THE_WAY_S:
                self._note(watched, DeadlineExceededError("the client's own deadline passed"))
            raise
        else:
            self._endings.pop(watched.fleet_id, None)
            if may_have_ended_before:
                self._tell(watched.fleet_id, None)

    def _note(self, watched: WatchedCall, error: TidegateError) -> None:
        request_id = watched.fleet_id.partition("/")[2]
        if len(request_id) > _MAX_ID_LENGTH:
            request_id = ""
        self._num_nameless += 1
        key = watched.fleet_id if request_id else str(self._num_nameless)
        # Not the error itself, which holds on to all that was on its way.
        message = error.message[:_MAX_MESSAGE_LENGTH]
        now = self._clock.monotonic()
        ending = Ending(watched.tenant_id, request_id, error.status, error.reason, message, error.retry_after_s, now)
        self._endings[key] = ending
        self._endings.move_to_end(key)
        if request_id:
            self._tell(key, ending)
        if len(self._endings) > self._max_kept:
            self._endings.popitem(last=False)


@dataclass(slots=True)
class WatchedCall:
    """A call whose request may get its id only later; empty: it has none yet."""

    tenant_id: str
    fleet_id: str
    deadline: float | None = None  # the client's, in monotonic seconds
