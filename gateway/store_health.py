"""Whether the queue's store answers, as everybody who calls it has seen last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from common.errors import UnavailableError
from common.metrics import GatewayMetrics
from common.types import Reason

_log = structlog.get_logger(__name__)

_RETRY_AFTER_S = 1.0


class StoreHealth:
    """One line in the log for each change, a metric, and a word to whoever shows the gateway's health."""

    def __init__(self, metrics: GatewayMetrics, on_change: Callable[[], None]) -> None:
        self._metrics = metrics
        self._on_change = on_change
        self.is_up = False  # until the first answer
        self._is_reported_down = False

    @property
    def is_lost(self) -> bool:
        """Whether it is known to be out of reach: nobody need wait to find out."""
        return self._is_reported_down

    def check(self) -> None:
        """Raises UnavailableError(STORE_UNAVAILABLE) while it is known to be lost, for what cannot do without it."""
        if self._is_reported_down:
            raise self.unavailable()

    def unavailable(self) -> UnavailableError:
        """What a client is told that cannot be served without it."""
        message = "the store is out of reach, and this cannot be done without it"
        return UnavailableError(message, reason=Reason.STORE_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S)

    def answered(self) -> None:
        """A call got its answer."""
        if not self.is_up:
            self.is_up = True
            self._metrics.store_up.set(1)
            _log.info("store_up")
            self._on_change()
        self._is_reported_down = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around calls whose loss is made up for elsewhere: notes that they did not reach it, and goes on."""
        try:
            yield
        except UnavailableError as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """A call did not reach it."""
        self._metrics.store_errors.inc()
        if not self._is_reported_down:
            self._is_reported_down = True
            _log.warning("store_down", error=str(error))
        if self.is_up:
            self.is_up = False
            self._metrics.store_up.set(0)
            self._on_change()
