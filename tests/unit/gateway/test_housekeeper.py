from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from common.errors import TidegateError
from common.metrics import GatewayMetrics
from common.types import Reason
from gateway.admission.drain_rate import DrainRate
from gateway.admission.limiter import Unlimited
from gateway.admission.limits import NO_LIMITS, TenantLimits
from gateway.background import Background
from gateway.dispatcher import Dispatcher, DispatcherSettings
from gateway.housekeeper import Housekeeper, HousekeeperSettings
from gateway.lifecycle import RequestState
from gateway.live import LiveRequest
from gateway.placement.fleet import Fleet
from gateway.placement.worker import RejectedEvent, WorkerState
from gateway.queueing.queue import Claim
from gateway.store_health import StoreHealth
from tests.unit.gateway.fakes import SERVED, FakeClock, FakeQueue, FakeSession, live_request


@dataclass
class Bench:
    housekeeper: Housekeeper
    dispatcher: Dispatcher
    queue: FakeQueue
    clock: FakeClock
    fleet: Fleet
    session: FakeSession

    def enqueued(self, limits: TenantLimits = NO_LIMITS) -> LiveRequest:
        live = live_request(limits=limits)
        self.dispatcher.register(live)
        live.lifecycle.advance(RequestState.ADMITTED)
        live.enter_queue(self.clock.now)
        return live

    def sweep(self) -> None:
        self.housekeeper.sweep()

    async def end_of(self, live: LiveRequest) -> TidegateError | None:
        try:
            end = (await live.mailbox.take(0)).end
        except TimeoutError:
            return None
        assert end is not None
        return end.error


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    metrics = GatewayMetrics(CollectorRegistry())
    background = Background(lambda: None)
    queue, clock, store = FakeQueue(), FakeClock(), StoreHealth(metrics, lambda: None)
    fleet, drain_rate = Fleet(clock.monotonic, ""), DrainRate(lambda low, high: 1.0)
    dispatcher = Dispatcher(queue, fleet, background, store, metrics, clock, drain_rate, DispatcherSettings("me", 3))
    session = FakeSession()
    dispatcher.on_ready(session, SERVED)
    settings = HousekeeperSettings(queue_ttl_s=60, no_worker_timeout_s=10, heartbeat_s=1, heartbeat_ttl_s=5)
    housekeeper = Housekeeper(dispatcher, queue, Unlimited(), fleet, store, metrics, clock, drain_rate, settings)
    yield Bench(housekeeper, dispatcher, queue, clock, fleet, session)
    await background.close()


async def test_waiting_ends_after_the_queues_limit(bench: Bench) -> None:
    live = bench.enqueued()
    bench.clock.now += 59.9
    bench.sweep()
    assert await bench.end_of(live) is None
    bench.clock.now += 0.1
    bench.sweep()
    error = await bench.end_of(live)
    assert error is not None
    assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", Reason.QUEUE_TTL)
    assert error.retry_after_s is not None


async def test_without_workers_it_ends_sooner_and_says_so(bench: Bench) -> None:
    live = bench.enqueued()
    bench.clock.now += 20
    bench.session.state = WorkerState.DRAINING
    bench.fleet.refresh()
    bench.clock.now += 9
    bench.sweep()
    assert await bench.end_of(live) is None
    bench.clock.now += 1
    bench.sweep()
    error = await bench.end_of(live)
    assert error is not None
    assert (error.status, error.reason) == ("UNAVAILABLE", Reason.NO_WORKERS)


async def test_a_newcomer_gets_its_own_time_without_workers(bench: Bench) -> None:
    bench.dispatcher.on_end("w1", 1, WorkerState.LOST)
    bench.clock.now += 100
    live = bench.enqueued()
    bench.clock.now += 9
    bench.sweep()
    assert await bench.end_of(live) is None


async def test_what_runs_is_not_waiting(bench: Bench) -> None:
    live = bench.enqueued()
    live.begin(Claim(live.fleet_id, "me", "w1", 1, 1), bench.clock.now)
    bench.clock.now += 1000
    bench.sweep()
    assert await bench.end_of(live) is None


async def test_a_request_that_workers_keep_refusing_has_waited_all_the_time(bench: Bench) -> None:
    live = bench.enqueued()
    for attempt in range(1, 7):
        bench.clock.now += 10
        live.begin(Claim(live.fleet_id, "me", "w1", 1, attempt), bench.clock.now)
        bench.dispatcher.on_rejected("w1", RejectedEvent(live.fleet_id, attempt, Reason.NO_CREDIT, ""))
    bench.sweep()
    error = await bench.end_of(live)
    assert error is not None
    assert error.reason is Reason.QUEUE_TTL


@pytest.mark.parametrize("is_running", [False, True])
async def test_requests_that_the_queue_lost_end_if_they_wait_and_go_on_if_they_run(
    bench: Bench, is_running: bool
) -> None:
    live = bench.enqueued()
    if is_running:
        live.begin(Claim(live.fleet_id, "me", "w1", 1, 1), bench.clock.now)
    bench.queue.unknown = [live.fleet_id, "acme/never-seen"]
    await bench.housekeeper.beat()
    error = await bench.end_of(live)
    if is_running:
        assert error is None
        bench.dispatcher.on_end("w1", 1, WorkerState.LOST)  # the queue cannot hand it on
        error = await bench.end_of(live)
        assert error is not None
        assert error.reason is Reason.WORKER_LOST
    else:
        assert error is not None
        assert error.reason is Reason.STORE_UNAVAILABLE
    await asyncio.sleep(0)


async def test_a_tenants_own_limit_of_waiting_counts_if_it_is_shorter(bench: Bench) -> None:
    patient = bench.enqueued(TenantLimits(max_queue_wait_s=1000))
    bench.clock.now += 1
    bench.dispatcher.unregister(patient)
    hasty = bench.enqueued(TenantLimits(max_queue_wait_s=5))
    bench.clock.now += 4.9
    bench.sweep()
    assert await bench.end_of(hasty) is None
    bench.clock.now += 0.1
    bench.sweep()
    error = await bench.end_of(hasty)
    assert error is not None
    assert error.reason is Reason.QUEUE_TTL
    assert "5 s" in error.message


async def test_output_is_charged_to_its_flow_and_kept_while_the_store_is_down(bench: Bench) -> None:
    await bench.housekeeper.charge()
    assert bench.queue.charged == []
    flow = live_request().request.flow
    bench.dispatcher.output_meter.add(flow, 3)
    bench.queue.is_down = True
    await bench.housekeeper.charge()
    bench.queue.is_down = False
    bench.dispatcher.output_meter.add(flow, 2)
    await bench.housekeeper.charge()
    await bench.housekeeper.charge()
    assert bench.queue.charged == [{flow: 5}]
