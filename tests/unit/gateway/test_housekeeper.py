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
from gateway.lifecycle import gone
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
    background: Background

    def enqueued(self, request_id: str = "r1", limits: TenantLimits = NO_LIMITS) -> LiveRequest:
        live = live_request(request_id, limits=limits)
        self.dispatcher.register(live)
        live.enter_queue(self.clock.now)
        return live

    def sweep(self) -> None:
        self.housekeeper.sweep()

    async def end_of(self, live: LiveRequest) -> TidegateError | None:
        try:
            async with asyncio.timeout(0):
                end = (await live.mailbox.take()).end
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
    dispatcher = Dispatcher(
        queue, fleet, background, store, metrics, clock, drain_rate, DispatcherSettings("me", 3, 5, 6.0, 4)
    )
    session = FakeSession()
    dispatcher.on_ready(session, SERVED)
    settings = HousekeeperSettings(
        queue_ttl_s=60, no_worker_timeout_s=10, heartbeat_s=1, heartbeat_ttl_s=5, store_wait_s=30
    )
    housekeeper = Housekeeper(dispatcher, queue, Unlimited(), fleet, store, metrics, clock, drain_rate, settings)
    yield Bench(housekeeper, dispatcher, queue, clock, fleet, session, background)
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


async def test_requests_that_the_queue_lost_wait_again_in_their_order_or_go_on(bench: Bench) -> None:
    running, late, early = bench.enqueued("running"), bench.enqueued("late"), bench.enqueued("early")
    for live in (running, late, early):
        live.is_enqueued = True
    running.begin(Claim(running.fleet_id, "me", "w1", 1, 4), bench.clock.now)
    late.begin(Claim(late.fleet_id, "me", "w1", 1, 2), bench.clock.now)
    late.back_to_queue(queued_at=bench.clock.now + 1)
    bench.queue.unknown = [late.fleet_id, running.fleet_id, early.fleet_id, "acme/never-seen"]
    await bench.housekeeper.beat()
    await bench.background.finish_steps(1)
    assert [(entry.request_id, entry.attempt) for entry in bench.queue.enqueued] == [
        (early.fleet_id, 0),
        (late.fleet_id, 2),
    ]
    for live in (running, late, early):
        assert await bench.end_of(live) is None


async def test_a_request_that_ends_while_it_is_restored_leaves_nothing_in_the_queue(bench: Bench) -> None:
    live = bench.enqueued()
    live.is_enqueued = True
    bench.dispatcher.restore(live)
    live.lifecycle.finish(gone())
    await bench.background.finish_steps(1)
    assert bench.queue.finished == [entry.request_id for entry in bench.queue.enqueued] == [live.fleet_id]


async def test_a_tenants_own_limit_of_waiting_counts_if_it_is_shorter(bench: Bench) -> None:
    patient = bench.enqueued(limits=TenantLimits(max_queue_wait_s=1000))
    bench.clock.now += 1
    bench.dispatcher.unregister(patient)
    hasty = bench.enqueued(limits=TenantLimits(max_queue_wait_s=5))
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
