from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from common.errors import UnavailableError
from common.metrics import GatewayMetrics
from common.types import FinishReason, Reason
from gateway import bookkeeper
from gateway.admission.drain_rate import DrainRate
from gateway.background import Background
from gateway.bookkeeper import Bookkeeper
from gateway.dispatcher import Dispatcher, DispatcherSettings
from gateway.ledger import UsageRecord
from gateway.lifecycle import finished
from gateway.placement.fleet import Fleet
from gateway.store_health import StoreHealth
from tests.unit.gateway.fakes import FakeClock, FakeQueue, live_request


@dataclass(eq=False)
class FakeLedger:
    is_down: bool = False
    opened: list[UsageRecord] = field(default_factory=list)
    noted: list[UsageRecord] = field(default_factory=list)
    note_sizes: list[int] = field(default_factory=list)
    closed: list[UsageRecord] = field(default_factory=list)
    num_reaps: int = 0
    tries_until_back: int | None = None
    is_silent: bool = False

    def _answer(self) -> None:
        if self.is_down and self.tries_until_back is not None:
            self.is_down, self.tries_until_back = self.tries_until_back > 0, self.tries_until_back - 1
        if self.is_down:
            raise UnavailableError("down", reason=Reason.STORE_UNAVAILABLE)

    def open(self, record: UsageRecord) -> asyncio.Future[None]:
        async def opening() -> None:
            self._answer()
            self.opened.append(record)

        return asyncio.ensure_future(opening())

    async def note(self, records: Sequence[UsageRecord]) -> None:
        self._answer()
        self.noted.extend(records)
        self.note_sizes.append(len(records))

    def close(self, record: UsageRecord) -> asyncio.Future[bool]:
        closing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            self._answer()
        except UnavailableError as error:
            closing.set_exception(error)
        else:
            if not self.is_silent:
                self.closed.append(record)
                closing.set_result(True)
        return closing

    async def reap(self) -> int:
        self._answer()
        self.num_reaps += 1
        return 0

    async def leave(self) -> None:
        self._answer()


@dataclass
class Desk:
    books: Bookkeeper
    ledger: FakeLedger
    dispatcher: Dispatcher


@pytest.fixture
def desk() -> Desk:
    metrics = GatewayMetrics(CollectorRegistry())
    store, clock, ledger = StoreHealth(metrics, lambda: None), FakeClock(), FakeLedger()
    dispatcher = Dispatcher(
        FakeQueue(),
        Fleet(clock.monotonic, ""),
        Background(lambda: None),
        store,
        metrics,
        clock,
        DrainRate(lambda low, high: 1.0),
        DispatcherSettings("me", 3, 5, 6.0, 4),
    )
    numbers = iter("abcdef")
    books = Bookkeeper(ledger, dispatcher, store, clock, period_s=1.0, choose_id=lambda: next(numbers))
    return Desk(books, ledger, dispatcher)


async def test_a_record_is_renewed_only_when_tokens_have_come(desk: Desk) -> None:
    live = live_request()
    desk.dispatcher.register(live)
    await desk.books.open(live)
    await desk.books.look()
    assert desk.ledger.noted == []
    live.output_token_ids.extend([1, 2])
    await desk.books.look()
    await desk.books.look()
    assert [record.generated_tokens for record in desk.ledger.noted] == [2]
    assert desk.ledger.num_reaps == 3


async def test_many_records_are_renewed_a_few_at_a_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeper, "_NOTED_TOGETHER", 2)
    lives = [live_request(f"r{number}") for number in range(5)]
    for live in lives:
        desk.dispatcher.register(live)
        await desk.books.open(live)
        live.output_token_ids.append(1)
    await desk.books.look()
    assert sorted(record.record_id for record in desk.ledger.noted) == sorted("abcde")
    assert desk.ledger.note_sizes == [2, 2, 1]
    await desk.books.look()
    assert len(desk.ledger.noted) == 5


async def test_what_the_store_cannot_take_is_written_when_it_can(desk: Desk) -> None:
    live = live_request()
    await desk.books.open(live)
    desk.ledger.is_down = True
    outcome = finished(FinishReason.LENGTH)
    live.lifecycle.finish(outcome)
    closing = desk.books.close(live, outcome)
    assert closing is not None
    with pytest.raises(UnavailableError):
        await closing
    await desk.books.look()
    assert desk.ledger.closed == []
    desk.ledger.is_down = False
    await desk.books.look()
    await desk.books.look()
    assert [(record.outcome, record.reason) for record in desk.ledger.closed] == [("completed", "LENGTH")]


async def test_what_could_not_be_opened_is_closed_all_the_same(desk: Desk) -> None:
    """The open may have reached the store although its answer was lost."""
    live = live_request()
    desk.ledger.is_down = True
    with pytest.raises(UnavailableError):
        await desk.books.open(live)
    desk.ledger.is_down = False
    outcome = finished(FinishReason.CANCELLED)
    live.lifecycle.finish(outcome)
    desk.books.close(live, outcome)
    assert [record.record_id for record in desk.ledger.closed] == ["a"]
    assert desk.books.close(live_request("r2"), outcome) is None, "it was never opened"
    assert len(desk.ledger.closed) == 1


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_closing_without_an_answer_is_written_again_at_the_end(desk: Desk, *, is_cancelled: bool) -> None:
    live = live_request()
    await desk.books.open(live)
    outcome = finished(FinishReason.LENGTH)
    live.lifecycle.finish(outcome)
    desk.ledger.is_silent = True
    closing = desk.books.close(live, outcome)
    assert closing is not None
    desk.ledger.is_silent = False
    await desk.books.look()
    assert desk.ledger.closed == []  # it may be on its way
    if is_cancelled:
        closing.cancel()
    await desk.books.stop(patience_s=10)
    assert [record.record_id for record in desk.ledger.closed] == ["a"]


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_store_that_is_away_at_the_end_is_waited_for_but_not_for_ever(desk: Desk, comes_back: bool) -> None:
    desk.ledger.is_down = True
    outcome = finished(FinishReason.LENGTH)
    for name in ("r1", "r2"):
        live = live_request(name)
        desk.books.promise(live)
        live.lifecycle.finish(outcome)
        closing = desk.books.close(live, outcome)
        assert closing is not None
        with pytest.raises(UnavailableError):
            await closing
    desk.ledger.tries_until_back = 2 if comes_back else None
    await desk.books.stop(patience_s=60 if comes_back else 0.5)
    assert [record.request_id for record in desk.ledger.closed] == (["acme/r1", "acme/r2"] if comes_back else [])
