"""What the programs' own metrics say, read as a scrape reads it."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bench.load.scrape import Endpoints, Timeline, combine, fetch, parse, watch
from common.metrics import GatewayMetrics, MetricsServer, WorkerMetrics


def worker(running: int, preemptions: int = 0) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.set_usage(running=running, waiting=1, empty=5, cached=3, referenced=2, swapping=0)
    metrics.preemptions.inc(preemptions)
    metrics.output_tokens.inc(70)
    return registry


def gateway(high: int, low: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.queue_depth.labels("high").set(high)
    metrics.queue_depth.labels("low").set(low)
    return registry


def test_workers_add_up_and_gateways_look_at_one_queue() -> None:
    workers = [parse(generate_latest(worker(2, 4)).decode()), parse(generate_latest(worker(3)).decode())]
    gateways = [parse(generate_latest(gateway(1, 6)).decode()), parse(generate_latest(gateway(1, 5)).decode())]
    sample = combine(1.5, workers, gateways)
    assert (sample.running, sample.waiting, sample.queued) == (5, 2, 7)
    assert sample.blocks == {"referenced": 4, "cached": 6, "swapping": 0, "empty": 10}
    assert (sample.preemptions, sample.output_tokens) == (4, 140)
    assert sample.to_json()["at_s"] == 1.5


async def test_watching_a_real_endpoint_and_one_that_is_gone() -> None:
    with MetricsServer("127.0.0.1:0", worker(2)) as server:
        here = f"127.0.0.1:{server.port}"
        assert fetch(here)[("tidegate_worker_running", "")] == 2
        timeline = Timeline()
        enough = asyncio.Event()

        async def sleep(_: float) -> None:
            if len(timeline.samples) == 3:
                enough.set()
            await asyncio.sleep(0)

        times = iter(range(100_000))
        watching = asyncio.create_task(watch(Endpoints((here,)), timeline, lambda: float(next(times)), 1.0, sleep))
        await enough.wait()
        watching.cancel()
    assert [sample.at_s for sample in timeline.samples[:3]] == [0.0, 1.0, 2.0]
    assert timeline.num_errors == 0

    gone = Timeline()

    async def stop_at_once(_: float) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await watch(Endpoints((here,)), gone, lambda: 0.0, 1.0, stop_at_once)
    assert (gone.num_errors, gone.samples) == (1, [])
    assert gone.last_error


async def test_without_endpoints_nothing_is_watched() -> None:
    timeline = Timeline()
    await watch(Endpoints(), timeline, lambda: 0.0, 1.0)
    assert timeline.samples == []
