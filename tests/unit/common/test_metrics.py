from __future__ import annotations

import socket
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from common.metrics import GatewayMetrics, MetricsServer, QuickHistogram, WorkerMetrics
from common.types import BlockUsage

USAGE = BlockUsage(1, empty=5, cached=4, referenced=3, swapping=2, running=7, waiting=6, free_slots=1)


def page(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_each_instance_has_its_own_registry() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics(first).claims.inc()
    GatewayMetrics(second)
    assert "tidegate_gateway_claims_total 1.0" in page(first)
    assert "tidegate_gateway_claims_total 0.0" in page(second)


def test_a_worker_that_left_leaves_no_series() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.set_worker_usage("w1", USAGE)
    assert 'tidegate_gateway_worker_blocks{state="cached",worker="w1"} 4.0' in page(registry)
    metrics.forget_worker("w1")
    metrics.forget_worker("never-seen")
    assert "w1" not in page(registry)


def test_a_workers_own_numbers() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry).set_usage(running=7, waiting=6, empty=5, cached=4, referenced=3, swapping=2)
    shown = page(registry)
    for state, count in (("empty", 5), ("cached", 4), ("referenced", 3), ("swapping", 2)):
        assert f'tidegate_worker_blocks{{state="{state}"}} {count}.0' in shown
    assert "tidegate_worker_running 7.0" in shown
    assert "tidegate_worker_waiting 6.0" in shown


def test_names_are_ours_and_units_are_seconds() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    WorkerMetrics(registry)
    for family in registry.collect():
        assert family.name.startswith(("tidegate_gateway_", "tidegate_worker_"))
        assert family.documentation
        assert not family.name.endswith(("_s", "_ms"))


def test_the_endpoint_serves_and_closes() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    with MetricsServer("127.0.0.1:0", registry) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        assert b"tidegate_gateway_live_streams" in urllib.request.urlopen(url, timeout=60).read()
        with pytest.raises(OSError, match="in use"):
            MetricsServer(f"127.0.0.1:{server.port}", registry)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


@given(st.lists(st.floats(0, 10) | st.sampled_from([0.002, 0.01, 2.5]), max_size=50))
def test_a_quick_histogram_shows_what_the_librarys_would(values: list[float]) -> None:
    bounds = (0.002, 0.01, 1, 2.5)
    quick, plain = CollectorRegistry(), CollectorRegistry()
    ours = QuickHistogram("gap_seconds", "Gaps", bounds, "band")
    quick.register(ours)
    theirs = Histogram("gap_seconds", "Gaps", ["band"], buckets=bounds, registry=plain)
    for value in values:
        ours.labels("low").observe(value)
        theirs.labels("low").observe(value)
    assert page(quick) == "".join(line for line in page(plain).splitlines(True) if "_created" not in line)
