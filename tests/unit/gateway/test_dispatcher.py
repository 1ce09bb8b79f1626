from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from common.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from common.metrics import GatewayMetrics
from common.types import BlockUsage, ClaimRef, FinishReason, Reason
from gateway.admission.drain_rate import DrainRate
from gateway.background import Background
from gateway.dispatcher import Dispatcher, DispatcherSettings
from gateway.journal import Pen
from gateway.lifecycle import RequestState, gone
from gateway.live import LiveRequest
from gateway.placement.fleet import Fleet
from gateway.placement.scoring import Prefix
from gateway.placement.worker import RejectedEvent, TokensEvent, WorkerState
from gateway.queueing.queue import Claim, Place
from gateway.store_health import StoreHealth
from tests.unit.gateway.fakes import SERVED, FakeClock, FakeQueue, FakeSession, live_request


@dataclass
class Bench:
    dispatcher: Dispatcher
    queue: FakeQueue
    fleet: Fleet
    session: FakeSession
    background: Background
    store: StoreHealth

    def enqueued(self, request_id: str = "r1") -> LiveRequest:
        live = live_request(request_id)
        self.dispatcher.register(live)
        live.enter_queue(100.0)
        return live

    async def claim(self, live: LiveRequest, attempt: int = 1, *, worker_id: str = "w1", epoch: int = 1) -> None:
        self.queue.claims.append(Claim(live.fleet_id, "me", worker_id, epoch, attempt))
        await self.run()

    async def run(self) -> None:
        """One run of the script, and what follows at once."""
        self.dispatcher.kick()
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    metrics = GatewayMetrics(CollectorRegistry())
    background = Background(lambda: None)
    queue, clock, store = FakeQueue(), FakeClock(), StoreHealth(metrics, lambda: None)
    fleet, drain_rate = Fleet(clock.monotonic, ""), DrainRate(lambda low, high: 1.0)
    dispatcher = Dispatcher(
        queue, fleet, background, store, metrics, clock, drain_rate, DispatcherSettings("me", 3, 5, 6.0, 4)
    )
    background.run(dispatcher._dispatch_loop, "dispatch")
    session = FakeSession()
    dispatcher.on_ready(session, SERVED)
    yield Bench(dispatcher, queue, fleet, session, background, store)
    assert not background.is_crashed
    await background.close()


def tokens(attempt: int, *token_ids: int, reason: FinishReason | None = None, cached: int = 0) -> TokensEvent:
    return TokensEvent("acme/r1", attempt, token_ids, (), reason, cached)


async def test_a_claim_is_submitted_with_its_attempt(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live, attempt=4)
    [submission] = bench.session.submitted
    assert (submission.request_id, submission.attempt, submission.prompt_token_ids) == ("acme/r1", 4, (1, 2, 3))
    assert live.lifecycle.state is RequestState.DISPATCHED


async def test_claims_of_others_and_old_ones_are_left_alone(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live, attempt=2)
    bench.queue.claims += [Claim("acme/r1", "me", "w1", 1, 1), Claim("acme/r1", "other", "w1", 1, 9)]
    await bench.run()
    assert [submission.attempt for submission in bench.session.submitted] == [2]


async def test_a_claim_of_a_request_that_is_gone_is_given_up(bench: Bench) -> None:
    bench.queue.claims.append(Claim("acme/nobody", "me", "w1", 1, 1))
    await bench.run()
    assert bench.queue.finished == ["acme/nobody"]
    live = bench.enqueued()
    live.lifecycle.finish(gone())
    await bench.claim(live)
    assert bench.session.submitted == []


async def test_tokens_reach_the_stream_only_from_the_current_attempt(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live, attempt=2)
    for worker_id, event in [("w1", tokens(1, 8)), ("w2", tokens(2, 8)), ("w1", tokens(2, 65, cached=2))]:
        bench.dispatcher.on_tokens(worker_id, event)
    assert live.output_token_ids == [65]
    assert live.cached_prompt_tokens == 2
    assert live.lifecycle.state is RequestState.STREAMING
    bench.dispatcher.on_tokens("w1", tokens(2, 66, reason=FinishReason.LENGTH))
    delivery = await live.mailbox.take()
    assert (delivery.token_ids, delivery.finish_reason) == ([65, 66], FinishReason.LENGTH)
    bench.dispatcher.stop_work(live)
    assert bench.session.aborted == []  # the worker is done with it


async def test_what_is_generated_is_not_generated_again_for_a_slow_reader(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_tokens("w1", tokens(1, 65, reason=FinishReason.STOP))
    await bench.claim(live, attempt=2)  # e.g. the claim's lease ended before the finish came to the store
    bench.dispatcher.on_end("w1", 1, WorkerState.LOST)
    assert len(bench.session.submitted) == 1
    assert (await live.mailbox.take()).token_ids == [65]


@pytest.mark.parametrize("state", [WorkerState.LOST, WorkerState.CLOSED])
async def test_requests_of_a_worker_that_ended_resume_first_with_their_tokens(bench: Bench, state: WorkerState) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_tokens("w1", tokens(1, 65, 66))
    bench.dispatcher.on_end("w1", 1, state)
    await bench.run()
    assert bench.queue.requeued == [("acme/r1", 1, Place.FIRST, 5)]
    assert bench.queue.forgotten == [("w1", 1)]
    bench.dispatcher.on_tokens("w1", tokens(1, 67))  # too late: another worker will make it
    other = FakeSession("w2")
    bench.dispatcher.on_ready(other, SERVED)
    await bench.claim(live, attempt=2, worker_id="w2")
    [submission] = other.submitted
    assert submission.output_token_ids == (65, 66)


async def test_the_third_loss_is_the_last(bench: Bench) -> None:
    live = bench.enqueued()
    for attempt in (1, 2, 3):
        bench.dispatcher.on_ready(FakeSession(epoch=attempt + 1), SERVED)
        await bench.claim(live, attempt, epoch=attempt + 1)
        bench.dispatcher.on_end("w1", attempt + 1, WorkerState.LOST)
        await bench.run()
    assert len(bench.queue.requeued) == 2
    end = (await live.mailbox.take()).end
    assert end is not None
    assert isinstance(end.error, UnavailableError)
    assert end.error.reason is Reason.WORKER_LOST


@pytest.mark.parametrize("reason", [Reason.NO_CREDIT, Reason.DRAINING])
async def test_a_refusal_puts_the_request_back_in_its_place(bench: Bench, reason: Reason) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_rejected("w1", RejectedEvent("acme/r1", 1, reason, ""))
    assert live.lifecycle.state is RequestState.QUEUED
    async with asyncio.timeout(30):
        while not bench.queue.requeued:  # noqa: ASYNC110 - after a short delay
            await asyncio.sleep(0.005)
    assert bench.queue.requeued == [("acme/r1", 1, Place.SAME, 3)]
    assert live.num_losses == 0


@pytest.mark.parametrize(
    ("reason", "kind"), [(Reason.NEVER_FITS, InvalidRequestError), (Reason.INTERNAL, InternalError)]
)
async def test_any_other_refusal_ends_it(bench: Bench, reason: Reason, kind: type[Exception]) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_rejected("w1", RejectedEvent("acme/r1", 1, reason, "needs 3, has 2"))
    end = (await live.mailbox.take()).end
    assert end is not None
    assert isinstance(end.error, kind)


async def test_a_worker_that_gives_a_request_up_unasked_has_lost_it(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_tokens("w1", tokens(1, reason=FinishReason.CANCELLED))
    await bench.run()
    assert bench.queue.requeued == [("acme/r1", 1, Place.FIRST, 3)]
    assert live.mailbox.num_unread_tokens == 0


async def test_a_claim_for_an_unknown_session_goes_back(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live, worker_id="elsewhere")
    assert live.lifecycle.state is RequestState.QUEUED
    assert live.claim is None
    assert bench.session.submitted == []


async def test_a_newer_attempt_replaces_the_running_one(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_tokens("w1", tokens(1, 65))
    await bench.claim(live, attempt=2)
    assert bench.session.aborted == [("acme/r1", 1)]
    assert bench.session.submitted[1].output_token_ids == (65,)


async def test_reports_survive_a_store_that_is_away(bench: Bench) -> None:
    bench.queue.is_down = True
    bench.dispatcher.on_usage("w1", BlockUsage(1, 1, 1, 1, 0, 0, 0, 1, (ClaimRef("acme/a", 1),)))
    await bench.run()
    assert not bench.store.is_up
    bench.dispatcher.on_usage("w1", BlockUsage(2, 1, 1, 1, 0, 0, 0, 1, (ClaimRef("acme/b", 1),)))
    bench.queue.is_down = False
    async with asyncio.timeout(30):
        while not bench.queue.reports:  # noqa: ASYNC110 - after a backoff
            await asyncio.sleep(0.005)
    [report] = bench.queue.reports
    assert (report.usage.seq, [ref.request_id for ref in report.usage.accounted]) == (2, ["acme/a", "acme/b"])
    assert bench.store.is_up


async def test_a_workers_numbers_wait_for_company_unless_a_request_waits_for_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dispatcher._IDLE_REPORT_DELAY_S", 3600.0)

    def report(seq: int) -> None:
        bench.dispatcher.on_usage("w1", BlockUsage(seq, 1, 1, 1, 0, 0, 0, 1, ()))

    async def told(seq: int) -> None:
        async with asyncio.timeout(30):
            while seq not in [it.usage.seq for it in bench.queue.reports]:  # noqa: ASYNC110 - by a timer
                await asyncio.sleep(0.001)

    report(1)
    live = live_request("r1")
    bench.dispatcher.register(live)
    bench.dispatcher.enter_queue(live)  # it finds no room: the numbers do not wait any more
    await told(1)
    report(2)
    await told(2)
    await bench.claim(live)
    report(3)
    await asyncio.sleep(0.02)
    assert [it.usage.seq for it in bench.queue.reports] == [1, 2]
    bench.dispatcher.on_rejected("w1", RejectedEvent("acme/r1", 1, Reason.NO_CREDIT, ""))  # it waits again
    await told(3)
    live.lifecycle.finish(gone())
    bench.dispatcher.stop_work(live)
    report(4)
    bench.dispatcher.dispatch()  # with the next request they go, too
    assert [it.usage.seq for it in bench.dispatcher._run.reports] == [4]  # type: ignore[union-attr]
    await told(4)


async def test_a_request_alone_is_dispatched_at_once_and_sent_at_once_and_others_together(bench: Bench) -> None:
    alone = bench.enqueued("alone")
    bench.queue.claims.append(Claim(alone.fleet_id, "me", "w1", 1, 1))
    bench.dispatcher.dispatch()
    assert bench.dispatcher._run is not None
    bench.dispatcher.dispatch()  # its run is under way: another one follows
    await bench.run()
    assert bench.dispatcher._run is None
    crowd = [live_request(name) for name in ("a", "b")]
    for live in crowd:
        bench.dispatcher.register(live)
        bench.dispatcher.enter_queue(live)
        bench.queue.claims.append(Claim(live.fleet_id, "me", "w1", 1, 1))
    bench.dispatcher.dispatch()
    assert bench.dispatcher._run is None
    await bench.run()
    assert [(it.request_id, is_alone) for it, is_alone in bench.session.sent] == [
        ("acme/alone", True),
        ("acme/a", False),
        ("acme/b", False),
    ]


async def test_requests_are_cancelled_by_id_and_once(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.dispatcher.cancel("acme/r1")
    end = (await live.mailbox.take()).end
    assert end is not None
    assert end.finish_reason is FinishReason.CANCELLED
    live.lifecycle.finish(end)
    for fleet_id in ("acme/r1", "acme/r2"):
        with pytest.raises(NotFoundError):
            await bench.dispatcher.cancel(fleet_id)


async def test_ids_are_unique_among_the_live(bench: Bench) -> None:
    first = bench.enqueued()
    with pytest.raises(DuplicateRequestError):
        bench.dispatcher.register(live_request())
    bench.dispatcher.unregister(live_request())  # not the one that is live
    with pytest.raises(DuplicateRequestError):
        bench.dispatcher.register(live_request())
    bench.dispatcher.unregister(first)
    bench.dispatcher.register(live_request())


async def test_the_queue_is_told_where_a_prompt_is_cached(bench: Bench) -> None:
    bench.dispatcher.on_ready(FakeSession("w2"), SERVED)
    live, prompt = bench.enqueued(), tuple(range(40))
    live.prefix = Prefix(prompt, "salt")
    assert bench.dispatcher.entry_of(live).cached_blocks == {}
    await bench.claim(live)
    assert bench.dispatcher.entry_of(live).cached_blocks == {"w1": 2}
    bench.dispatcher.on_end("w1", 1, WorkerState.LOST)
    assert bench.dispatcher.entry_of(live).cached_blocks == {}


async def test_the_queue_is_told_which_workers_are_reached(bench: Bench) -> None:
    bench.dispatcher.on_ready(FakeSession("w2"), SERVED)
    await bench.run()
    assert bench.queue.reached[-1] == ["w1", "w2"]
    bench.dispatcher.on_end("w1", 1, WorkerState.LOST)
    await bench.run()
    assert bench.queue.reached[-1] == ["w2"]


async def test_what_is_resumed_waits_in_the_first_place_with_what_it_needs_now(bench: Bench) -> None:
    live = bench.enqueued()
    entry = bench.dispatcher.entry_of(live)
    assert (entry.is_resumed, entry.num_input_tokens, entry.num_tokens_needed) == (False, 3, 8)
    live.go_on_after(range(10), Pen(1))
    entry = bench.dispatcher.entry_of(live)
    assert (entry.is_resumed, entry.num_input_tokens, entry.num_tokens_needed) == (True, 13, 18)


async def test_the_worker_pauses_what_nobody_reads_and_a_new_one_begins_anew(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    bench.dispatcher.on_tokens("w1", tokens(1, 65, 66, 67))
    assert bench.session.paused == []
    bench.dispatcher.on_tokens("w1", tokens(1, 68))
    bench.dispatcher.on_tokens("w1", tokens(1, 69))  # on its way already
    assert bench.session.paused == [("acme/r1", 1, True)]
    await live.mailbox.take()
    bench.dispatcher.set_paused(live, False)
    assert bench.session.paused[1:] == [("acme/r1", 1, False)]
    bench.dispatcher.on_tokens("w1", tokens(1, 70, 71, 72, 73))
    assert live.is_paused
    bench.dispatcher.on_handed_back("w1", "acme/r1", 1)
    await bench.claim(live, attempt=2)
    assert not live.is_paused


async def test_what_a_worker_hands_back_waits_behind_fresh_work_a_bounded_number_of_times(bench: Bench) -> None:
    live = bench.enqueued()
    await bench.claim(live)
    assert not bench.session.submitted[0].may_hand_back, "there is no other worker"
    bench.dispatcher.on_ready(FakeSession("w2"), SERVED)
    for attempt in (2, 3, 4):
        await bench.claim(live, attempt)
        assert bench.session.submitted[-1].may_hand_back
        bench.dispatcher.on_tokens("w1", tokens(attempt, 65))
        bench.dispatcher.on_handed_back("w1", "acme/r1", attempt - 1)  # of another attempt
        bench.dispatcher.on_handed_back("w1", "acme/r1", attempt)
        await bench.run()
        assert bench.queue.requeued[-1] == ("acme/r1", attempt, Place.LAST, 3 + attempt - 1)
    await bench.claim(live, 5)
    assert not bench.session.submitted[-1].may_hand_back
    assert bench.session.submitted[-1].output_token_ids == (65, 65, 65)
    assert live.num_losses == 0


async def test_a_worker_knows_how_long_the_client_waits(bench: Bench) -> None:
    live = bench.enqueued()
    live.deadline = 107.5
    await bench.claim(live)
    assert bench.session.submitted[0].timeout_s == 7.5
    bench.dispatcher.on_rejected("w1", RejectedEvent("acme/r1", 1, Reason.DEADLINE, "too late"))
    end = (await live.mailbox.take()).end
    assert end is not None
    assert isinstance(end.error, DeadlineExceededError)
