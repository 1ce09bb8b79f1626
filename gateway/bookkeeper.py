"""Keeps the ledger: opens a record for each accepted request, renews it while it runs, closes it with its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from common.clock import Clock
from common.errors import UnavailableError
from gateway.background import Background
from gateway.dispatcher import Dispatcher
from gateway.ledger import Ledger, UsageRecord
from gateway.lifecycle import Outcome
from gateway.live import LiveRequest
from gateway.store_health import StoreHealth

_log = structlog.get_logger(__name__)

_RETRY_S = 0.2
_NOTED_TOGETHER = 16  # records: well under a millisecond's work


class Bookkeeper:
    """Owner of the records of this gateway's requests. What the store cannot take now is written when it can."""

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: Dispatcher,
        store: StoreHealth,
        clock: Clock,
        *,
        period_s: float,
        choose_id: Callable[[], str],
    ) -> None:
        """`period_s`: between looks at running requests, and so the usage that dies with a gateway at most."""
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._store = store
        self._clock = clock
        self._period_s = period_s
        self._choose_id = choose_id
        self._noted: dict[str, UsageRecord] = {}  # by record id
        self._unwritten: dict[str, UsageRecord] = {}  # closed here, and not yet in the store
        self._on_the_way: set[str] = set()  # of these, sent and not answered

    def start(self, background: Background) -> None:
        """Starts the loop."""
        background.run(self._loop, "bookkeeper")

    def promise(self, live: LiveRequest) -> None:
        """Its client is told that it is accepted: it gets a record, even if its end comes before that can be opened."""
        live.record_id = live.record_id or self._choose_id()

    def open(self, live: LiveRequest) -> asyncio.Future[Any]:
        """Says that it is accepted. Raises UnavailableError if that cannot be written down now; may be repeated.

        Sent by the call itself, and to be awaited for the answer.
        """
        self.promise(live)
        record = self._record(live)
        self._noted[record.record_id] = record
        return self._ledger.open(record)

    def close(self, live: LiveRequest, outcome: Outcome) -> asyncio.Future[bool] | None:
        """Writes what it has used and how it ended, now or later. None, and nothing, for one that was not accepted.

        Sent by the call itself, and to be awaited for the answer, which may be that the store cannot be reached.
        """
        if not live.record_id:
            return None
        self._noted.pop(live.record_id, None)
        record = self._record(live, outcome)
        self._unwritten[record.record_id] = record
        return self._write(record)

    def _write(self, record: UsageRecord) -> asyncio.Future[bool]:
        record_id = record.record_id

        def note(closing: asyncio.Future[bool]) -> None:
            self._on_the_way.discard(record_id)
            if not closing.cancelled() and closing.exception() is None:
                self._unwritten.pop(record_id, None)

        self._on_the_way.add(record_id)
        closing = self._ledger.close(record)
        closing.add_done_callback(note)
        return closing

    async def _write_left(self) -> None:
        for record_id, record in list(self._unwritten.items()):
            if record_id in self._on_the_way:
                continue
            try:
                await self._write(record)
            except UnavailableError as error:  # each of the others would wait as long for nothing
                self._store.failed(error)
                return

    async def _loop(self) -> None:
        while True:
            await self.look(pace_s=self._period_s)

    async def look(self, *, pace_s: float = 0.0) -> None:
        """Writes what is left over, renews what has changed, closes what dead gateways left.

        A few records at a time, spread over `pace_s` seconds: tokens do not wait for all of them at once.
        """
        await self._write_left()
        live = self._dispatcher.live
        parts = [live[start : start + _NOTED_TOGETHER] for start in range(0, len(live), _NOTED_TOGETHER)] or [()]
        try:
            for part in parts:
                await asyncio.sleep(pace_s / len(parts))
                await self._note(part)
            await self._ledger.reap()
        except UnavailableError as error:
            self._store.failed(error)

    async def _note(self, some: Sequence[LiveRequest]) -> None:
        changed = []
        for live in some:
            noted = self._noted.get(live.record_id)
            if noted is not None and noted.generated_tokens != len(live.output_token_ids) - live.num_prior_tokens:
                changed.append(self._record(live))
        if changed:
            await self._ledger.note(changed)
        self._noted.update((record.record_id, record) for record in changed if record.record_id in self._noted)

    async def stop(self, *, patience_s: float) -> None:
        """Writes what is left over, for which it waits so long for a store that is away, and leaves."""
        self._on_the_way.clear()  # nobody waits any more: of these it is not known whether they are written
        try:
            async with asyncio.timeout(patience_s):
                await self._write_left()
                while self._unwritten:
                    await asyncio.sleep(_RETRY_S)
                    await self._write_left()
        except TimeoutError:
            _log.warning("records_given_up", num_records=len(self._unwritten))
        try:
            await self._ledger.leave()
        except UnavailableError as error:  # others reap what is left open
            self._store.failed(error)

    def _record(self, live: LiveRequest, outcome: Outcome | None = None) -> UsageRecord:
        request, now = live.request, self._clock.monotonic()
        num_generated = len(live.output_token_ids) - live.num_prior_tokens
        reason = ""
        if outcome is not None and outcome.error is not None:
            reason = outcome.error.reason.name
        elif outcome is not None and outcome.finish_reason is not None:
            reason = outcome.finish_reason.name
        return UsageRecord(
            record_id=live.record_id,
            request_id=live.fleet_id,
            tenant=request.tenant.tenant_id,
            band=request.band.name.lower(),
            model=request.model.limits.model,
            prompt_tokens=live.num_payable_prompt_tokens,
            cached_prompt_tokens=live.cached_prompt_tokens,
            generated_tokens=num_generated,
            delivered_tokens=max(live.num_delivered_tokens - live.num_prior_tokens, 0),
            recomputed_tokens=live.num_recomputed_tokens,
            num_attempts=live.num_attempts,
            accepted_at=round(self._clock.time() - (now - live.accepted_at), 6),
            queue_s=round((now if live.taken_at is None else live.taken_at) - live.accepted_at, 6),
            ttft_s=0.0 if live.first_token_at is None else round(live.first_token_at - live.arrived, 6),
            total_s=round(now - live.arrived, 6),
            outcome="" if outcome is None else live.lifecycle.state.value,
            reason=reason,
        )
