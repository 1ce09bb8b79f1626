"""The loops, on a clock of the test's own and an answer of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from bench.load.driver import Driver, Loop
from bench.load.record import INTERRUPTED, OK, LoadRequest, Record
from client import Accepted, ClientError, Delta, Event, Finished, Timing
from common.types import FinishReason, Reason, Usage
from tests.unit.bench.load.made import FakeTime, request

OPEN = Loop()


def finished(num_output: int) -> Finished:
    return Finished(FinishReason.LENGTH, Usage(10, 3, num_output), Timing(0.25, 0.5, 1.0))


class Answers:
    """Every answer takes `service_s`: half of it to the first token, which comes alone, the other half to the rest."""

    def __init__(self, time: FakeTime, service_s: float = 0.0) -> None:
        self.time = time
        self.service_s = service_s
        self.num_at_once = self.most_at_once = 0
        self.sent: list[tuple[float, int]] = []
        self.never: set[int] = set()  # indices of requests that get no end
        self.refused: set[int] = set()
        self.stop = asyncio.Event()
        self.stop_at = 10_000  # the stop comes when so many were sent

    async def __call__(self, asked: LoadRequest) -> AsyncGenerator[Event, None]:
        self.sent.append((self.time.now - 100.0, asked.index))
        if len(self.sent) == self.stop_at:
            self.stop.set()
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            if asked.index in self.refused:
                raise ClientError("RESOURCE_EXHAUSTED", "full", reason=Reason.QUEUE_FULL)
            yield Accepted("r", "m", 10, 1)
            if asked.index in self.never:
                await asyncio.Event().wait()
            await self.time.sleep(self.service_s / 2)
            yield Delta("a", (1,))
            await self.time.sleep(self.service_s / 2)
            yield Delta("b", tuple(range(asked.num_output - 1)))
            yield finished(asked.num_output)
        finally:
            self.num_at_once -= 1


async def drive(answers: Answers, requests: list[LoadRequest], loop: Loop) -> list[Record]:
    driver = Driver(answers, answers.time, answers.time.sleep)
    await driver.run(requests, loop, answers.stop)
    return driver.progress.records


async def test_each_request_is_sent_when_it_is_due() -> None:
    answers = Answers(FakeTime())
    arrivals = [0.0, 0.5, 0.5, 3.25]
    requests = [replace(request(index), arrival_s=at) for index, at in enumerate(arrivals)]
    records = await drive(answers, requests[::-1], OPEN)
    assert [at for at, _ in answers.sent] == arrivals
    assert [record.scheduled_s for record in records] == arrivals
    assert all(record.lag_s == 0.0 for record in records)


async def test_an_answer_is_recorded_delivery_by_delivery() -> None:
    (record,) = await drive(Answers(FakeTime(), 2.0), [replace(request(), arrival_s=1.0)], OPEN)
    assert record.status == OK
    assert record.deliveries == [(2.0, 1), (3.0, 3)]
    assert record.ttft_s == 1.0
    assert record.tpot_s == pytest.approx(1 / 3)
    assert record.queue_s == 0.25
    assert record.usage == Usage(10, 3, 4)


async def test_waiting_for_a_place_is_latency() -> None:
    requests = [replace(request(index), arrival_s=0.0) for index in range(4)]
    answers = Answers(FakeTime(), 2.0)
    records = await drive(answers, requests, Loop(max_in_flight=1))
    assert answers.most_at_once == 1
    assert [record.e2e_s for record in records] == [2.0, 4.0, 6.0, 8.0]


async def test_a_closed_loop_keeps_so_many_under_way() -> None:
    answers = Answers(FakeTime(), 1.0)
    records = await drive(answers, [request(index) for index in range(9)], Loop(concurrency=3))
    assert answers.most_at_once == 3
    assert [record.scheduled_s for record in records] == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    assert all(record.status == OK for record in records)


async def test_a_closed_loop_starts_nothing_after_its_time() -> None:
    records = await drive(Answers(FakeTime(), 2.0), [request(index) for index in range(9)], Loop(1, duration_s=5.0))
    assert [record.scheduled_s for record in records] == [0.0, 2.0, 4.0]


async def test_refusals_are_recorded_and_do_not_stop_the_rest() -> None:
    answers = Answers(FakeTime())
    answers.refused = {1}
    records = await drive(answers, [request(index) for index in range(3)], Loop(concurrency=1))
    assert [record.outcome for record in records] == ["OK", "RESOURCE_EXHAUSTED/QUEUE_FULL", "OK"]
    assert records[1].is_refused
    assert records[1].end_s is not None


@pytest.mark.parametrize(("loop", "num_sent"), [(OPEN, 3), (Loop(max_in_flight=1), 1), (Loop(concurrency=2), 3)])
async def test_a_stop_returns_at_once_and_marks_what_was_under_way(loop: Loop, num_sent: int) -> None:
    answers = Answers(FakeTime())
    answers.never, answers.stop_at = {0}, num_sent
    requests = [replace(request(index), arrival_s=float(index)) for index in range(3)]
    records = await drive(answers, requests, loop)
    assert len(answers.sent) == num_sent
    assert records[0].status == INTERRUPTED
    assert all(record.status for record in records)
    assert answers.num_at_once == 0


async def test_a_fault_of_the_generator_itself_is_not_hidden() -> None:
    async def broken(_: LoadRequest) -> AsyncGenerator[Event, None]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ExceptionGroup) as caught:
        await Driver(broken, FakeTime()).run([request()], OPEN, asyncio.Event())
    assert caught.group_contains(ZeroDivisionError)
