"""How much of one kind of work is done in a turn of the event loop, whoever does it."""

from __future__ import annotations

import asyncio


class TurnBudget:
    """So many pieces of work in each turn of the event loop. Belongs to one event loop; for any number of tasks.

    With what they cause, these keep other things from their turn: a new request, which takes several turns, is not to
    wait for all of them in each.
    """

    def __init__(self, per_turn: int) -> None:
        """`per_turn`: pieces of work."""
        self._per_turn = per_turn
        self._left = per_turn

    def spend(self) -> bool:
        """Takes one piece. False if this turn has none left: `spent` waits for another."""
        if self._left == 0:
            return False
        if self._left == self._per_turn:
            asyncio.get_running_loop().call_soon(self._renew)
        self._left -= 1
        return True

    async def spent(self) -> None:
        """Takes one piece of the first turn that has one left."""
        while True:
            await asyncio.sleep(0)
            if self.spend():
                return

    def _renew(self) -> None:
        self._left = self._per_turn
