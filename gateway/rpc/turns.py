"""How much of one kind of work is done in a turn of the event loop, whoever does it."""

from __future__ import annotations

import asyncio
from collections import deque


class TurnBudget:
    """So many pieces of work in each turn of the event loop. Belongs to one event loop; for any number of tasks.

    With what they cause, these keep other things from their turn: a new request, which takes several turns, is not to
    wait for all of them in each. Who finds nothing left waits in line, and is not woken before there is something.
    """

    def __init__(self, per_turn: int) -> None:
        """`per_turn`: pieces of work."""
        self._per_turn = per_turn
        self._left = per_turn  # of this turn
        self._promised = 0  # of the next one, to who waited in line
        self._is_renewal_due = False
        self._line: deque[tuple[asyncio.Future[int], int]] = deque()

    async def take(self, wanted: int) -> int:
        """Takes up to so many pieces, at least one: of this turn, or of the first one that has some left."""
        self._see_to_renewal()
        if self._left and not self._line:
            number = min(wanted, self._left)
            self._left -= number
            return number
        granted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._line.append((granted, wanted))
        return await granted

    def _see_to_renewal(self) -> None:
        if not self._is_renewal_due:
            self._is_renewal_due = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Comes before those who were promised something for this turn."""
        self._is_renewal_due = False
        self._left, self._promised = self._per_turn - self._promised, 0
        if self._line or self._left < self._per_turn:  # the next turn is another one
            self._see_to_renewal()
        while self._line and self._promised < self._per_turn:
            granted, wanted = self._line.popleft()
            if not granted.done():  # else who waited has left
                number = min(wanted, self._per_turn - self._promised)
                self._promised += number
                granted.set_result(number)
