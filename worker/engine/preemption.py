"""Who gives back what it holds, when blocks or slots are short?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker.engine.levels import Level, Levels, num_decode_steps
from worker.engine.request import Request


def choose_victim(running: Sequence[Request], needy: Request, levels: Levels, step: int) -> Request:
    """Who goes when a decode finds no block; it may be the very request that asks.

    Paused requests go before all others, the latest arrival first. Then the lowest band goes first. Within it,
    long requests yield to others, the longest-running first; else, and among long ones, the latest arrival goes.
    Who has just been resumed is spared if its band has another one; who was preempted as often as allowed is
    spared if anybody else is there. If that is nobody, the latest arrival of the lowest band goes: the earliest of
    the highest stays, so somebody always gets done.
    """
    paused = [request for request in running if request.is_paused]
    if paused:
        return max(paused, key=lambda request: request.arrival)
    spared = [request for request in running if not levels.is_exhausted(request)] or running
    lowest = max(request.band for request in spared)
    band = [request for request in spared if request.band == lowest]
    candidates = [request for request in band if not levels.is_in_grace(request, step)] or band
    if levels.level(needy) < Level.LONG:
        long = [request for request in candidates if levels.level(request) is Level.LONG]
        if long:
            return max(long, key=num_decode_steps)
    return max(candidates, key=lambda request: request.arrival)


def list_yielding(long: Sequence[Request], levels: Levels, step: int) -> list[Request]:
    """The long requests that make way for newcomers, those of the lowest band and the longest-running first."""
    yielding = [request for request in long if levels.may_yield(request, step)]
    return sorted(yielding, key=lambda request: (request.band, num_decode_steps(request)), reverse=True)


def list_hand_backs(preempted: Iterable[Request], levels: Levels, now_s: float, hand_back_s: float) -> list[Request]:
    """The preempted requests that another worker should go on with: they have run long here, and waited in vain."""
    return [
        request
        for request in preempted
        if request.may_hand_back
        and not request.is_paused
        and request.num_tokens - request.num_given_tokens > levels.long_after_steps
        and now_s - request.left_s >= hand_back_s
    ]
