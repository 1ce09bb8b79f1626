"""Who gives its blocks back when there are none left?"""

from __future__ import annotations

from collections.abc import Sequence

from worker.engine.request import Request


def choose_victim(running: Sequence[Request]) -> Request:
    """The latest arrival of the lowest band, which may be the very request that asks.

    The earliest arrival of the highest band is never chosen while another runs, so somebody always gets done.
    """
    return max(running, key=lambda request: (request.band, request.arrival))
