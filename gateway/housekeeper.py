"""What has to be looked at from time to time: this gateway's sign of life, and requests that have waited too long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import Clock
from common.errors import LimitExceededError, TidegateError, UnavailableError
from common.metrics import GatewayMetrics
from common.types import Reason
from gateway.admission.drain_rate import DrainRate
from gateway.admission.limiter import Limiter
from gateway.background import Background
from gateway.dispatcher import Dispatcher
from gateway.lifecycle import RequestState, failed
from gateway.live import LiveRequest
from gateway.placement.fleet import Fleet
from gateway.queueing.queue import Queue
from gateway.store_health import StoreHealth

_SWEEP_S = 0.25
_CHARGE_S = 0.25
_STORE_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class HousekeeperSettings:
    """Bounds in seconds; see GatewaySettings."""

    queue_ttl_s: float
    no_worker_timeout_s: float
    heartbeat_s: float
    heartbeat_ttl_s: float
    store_wait_s: float


class Housekeeper:
    """Owner of the heartbeat and of the bounds of waiting."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        queue: Queue,
        limiter: Limiter,
        fleet: Fleet,
        store: StoreHealth,
        metrics: GatewayMetrics,
        clock: Clock,
        drain_rate: DrainRate,
        settings: HousekeeperSettings,
    ) -> None:
        self._dispatcher = dispatcher
        self._queue = queue
        self._limiter = limiter
        self._fleet = fleet
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._drain_rate = drain_rate
        self._settings = settings
        self._num_waiting = 0  # in all bands, as the store said last
        self._lost_since: float | None = None  # the store

    def start(self, background: Background) -> None:
        """Starts the loops."""
        background.run(self._heartbeat_loop, "heartbeat")
        background.run(self._sweep_loop, "sweep")
        background.run(self._charge_loop, "charge")

    async def _heartbeat_loop(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _sweep_loop(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    async def _charge_loop(self) -> None:
        while True:
            await asyncio.sleep(_CHARGE_S)
            await self.charge()

    async def charge(self) -> None:
        """Tells the queue which flows got how many tokens since the last time."""
        meter = self._dispatcher.output_meter
        tokens = meter.take()
        if not tokens:
            return
        try:
            await self._queue.charge(tokens)
        except UnavailableError as error:
            meter.give_back(tokens)
            self._store.failed(error)

    async def beat(self) -> None:
        """Says that this gateway lives, hears what the queue has lost, shows how full it is."""
        try:
            unknown = await self._queue.heartbeat(ttl_s=self._settings.heartbeat_ttl_s)
            await self._limiter.renew()
            depths = await self._queue.depths()
        except UnavailableError as error:
            self._store.failed(error)
            return
        self._store.answered()
        await self._dispatcher.reach.tell()
        self._restore(unknown)
        self._num_waiting = sum(depth.num_waiting for depth in depths)
        for depth in depths:
            band = depth.band.name.lower()
            self._metrics.queue_depth.labels(band).set(depth.num_waiting)
            self._metrics.queue_oldest_wait.labels(band).set(depth.oldest_wait_s)

    def sweep(self) -> None:
        """Ends requests that have waited too long."""
        now = self._clock.monotonic()
        if self._store.is_up:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = now
        for live in self._dispatcher.live:
            if live.lifecycle.state is RequestState.QUEUED:
                error = self._overdue(live, now)
                if error is not None:
                    live.end(failed(error))

    def _restore(self, unknown: Sequence[str]) -> None:
        """The queue has lost requests: those that wait take their places again in the order in which they came."""
        found = (self._dispatcher.find(fleet_id) for fleet_id in unknown)
        for live in sorted((live for live in found if live is not None), key=lambda live: live.queued_at):
            self._dispatcher.restore(live)

    def _overdue(self, live: LiveRequest, now: float) -> TidegateError | None:
        limits = self._settings
        lost_since = now if self._lost_since is None else self._lost_since
        if now - max(lost_since, live.queued_at) >= limits.store_wait_s:
            message = f"waited {limits.store_wait_s:g} s for the store of the queue, which is out of reach"
            return UnavailableError(message, reason=Reason.STORE_UNAVAILABLE, retry_after_s=_STORE_RETRY_S)
        model = live.request.model.limits.model
        unserved_s = min(self._fleet.unserved_s(model), now - live.queued_at)
        if unserved_s >= limits.no_worker_timeout_s and self._fleet.num_ready(model) == 0:
            message = f"no worker has served {model} for {unserved_s:.0f} s"
            return UnavailableError(message, reason=Reason.NO_WORKERS, retry_after_s=limits.no_worker_timeout_s)
        most_s = min(limits.queue_ttl_s, live.request.tenant.limits.max_queue_wait_s or limits.queue_ttl_s)
        if now - live.queued_at >= most_s and self._fleet.num_ready(model) > 0:
            message = f"waited {most_s:g} s in the queue, the most that is allowed here"
            retry_after_s = self._drain_rate.retry_after_s(self._num_waiting, now)
            return LimitExceededError(message, reason=Reason.QUEUE_TTL, retry_after_s=retry_after_s)
        return None
