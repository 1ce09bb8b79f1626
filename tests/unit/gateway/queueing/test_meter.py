from __future__ import annotations

from common.types import Band
from gateway.queueing.meter import OutputMeter
from gateway.queueing.queue import Flow

ACME, BOLT = Flow("m", Band.HIGH, "acme"), Flow("m", Band.HIGH, "bolt")


def test_what_is_taken_is_counted_once() -> None:
    meter = OutputMeter()
    meter.add(ACME, 3)
    meter.add(BOLT, 1)
    meter.add(ACME, 4)
    meter.add(Flow("m", Band.LOW, "acme"), 0)
    assert meter.take() == {ACME: 7, BOLT: 1}
    assert meter.take() == {}


def test_what_could_not_be_charged_is_charged_with_the_next() -> None:
    meter = OutputMeter()
    meter.add(ACME, 3)
    taken = meter.take()
    meter.add(ACME, 2)
    meter.give_back(taken)
    assert meter.take() == {ACME: 5}
