"""News by session until the step's end: outputs, rejections, and block usage when it changed."""

from __future__ import annotations

from common.types import BlockUsage, ClaimRef, Reason
from worker.engine.events import HandedBack, RequestOutput, RequestRejected, SessionOutput
from worker.engine.scheduler import Scheduler


class Outbox:
    """Collects what each open session is to be told, once per step.

    A claim is accounted for from the moment that the numbers contain it: when its request was first admitted, for it
    holds the blocks of its known tokens from then on, or their promise, which counts as referenced; or when it ended
    before that. Requests that still wait for their first admission are in no number but `waiting`, so that nobody
    subtracts them twice.
    """

    def __init__(self) -> None:
        self._news: dict[int, SessionOutput] = {}
        self._accounted: dict[int, list[ClaimRef]] = {}  # its keys are the open sessions
        self._told: dict[int, int] = {}  # the last usage's seq by session
        self._numbers: tuple[int, ...] = ()
        self._seq = 0
        self.has_news = False

    def open(self, session_id: int) -> None:
        """Starts to collect for a session; it is told the usage at once."""
        self._accounted[session_id] = []
        self._told[session_id] = 0
        self.has_news = True

    def close(self, session_id: int) -> None:
        """Drops all that a session would have been told."""
        del self._accounted[session_id], self._told[session_id]
        self._news.pop(session_id, None)
        self.has_news = True  # to the others: what it held is free

    def touch(self) -> None:
        """Says that the usage may have changed without an output."""
        self.has_news = True

    def add_output(self, session_id: int, output: RequestOutput) -> None:
        """One more output for an open session."""
        self._of(session_id).outputs.append(output)
        self.has_news = True

    def add_rejected(self, session_id: int, request_id: str, attempt: int, reason: Reason, message: str) -> None:
        """One more rejection for an open session."""
        self._of(session_id).rejected.append(RequestRejected(request_id, attempt, reason, message))
        self.has_news = True

    def add_handed_back(self, session_id: int, request_id: str, attempt: int) -> None:
        """One more request for an open session to go on with elsewhere."""
        self._of(session_id).handed_back.append(HandedBack(request_id, attempt))
        self.has_news = True

    def account(self, session_id: int, request_id: str, attempt: int) -> None:
        """The claim is contained in the next usage."""
        self._accounted[session_id].append(ClaimRef(request_id, attempt))
        self.has_news = True

    def collect(self, scheduler: Scheduler, free_slots: int) -> dict[int, SessionOutput]:
        """All news since the last call, with the usage for every session that has not seen these numbers."""
        counts = scheduler.manager.counts_with_promises
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        numbers = (counts.empty, counts.cached, counts.referenced, counts.swapping, running, waiting, free_slots)
        if numbers != self._numbers:
            self._numbers = numbers
            self._seq += 1
        for session_id, accounted in self._accounted.items():
            if accounted or self._told[session_id] != self._seq:
                self._of(session_id).usage = BlockUsage(self._seq, *numbers, accounted=tuple(accounted))
                self._told[session_id] = self._seq
                self._accounted[session_id] = []
        news, self._news = self._news, {}
        self.has_news = False
        return news

    def _of(self, session_id: int) -> SessionOutput:
        news = self._news.get(session_id)
        if news is None:
            news = self._news[session_id] = SessionOutput()
        return news
