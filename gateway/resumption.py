"""Writes resumable streams down while they run, and takes them over from wherever they ran."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from dataclasses import asdict, dataclass, replace

from common.errors import DuplicateRequestError, InvalidRequestError, NotFoundError, UnavailableError
from common.types import Band, FinishReason, SamplingParams
from gateway.background import Background
from gateway.dispatcher import Dispatcher
from gateway.journal import Adopted, Journal, Passage, Pen
from gateway.lifecycle import finished
from gateway.live import LiveRequest, ReadyRequest, fleet_request_id
from gateway.placement.fleet import Fleet
from gateway.requests import GenerateCall
from gateway.store_calls import StoreCalls
from gateway.store_health import StoreHealth
from gateway.tenants import Tenant

_FLUSH_S = 0.1  # tokens of so long may be generated again after a crash
_ROUNDS_PER_CHECK = 5  # of flushes: a run without news notices this seldom that another one has taken over


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request of the journal, to be gone on with here."""

    request: ReadyRequest
    writer: int
    answer: Passage


class Resumption:
    """Owner of the journals of this gateway's requests."""

    def __init__(
        self, journal: Journal, calls: StoreCalls, dispatcher: Dispatcher, fleet: Fleet, store: StoreHealth
    ) -> None:
        self._journal = journal
        self._calls = calls
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._store = store

    def start(self, background: Background) -> None:
        """Starts the loop."""
        background.run(self._loop, "journal")

    async def begin(self, live: LiveRequest, call: GenerateCall) -> Resumed | None:
        """Begins the journal of a resumable request. If there is one under its idempotency key, takes that over.

        Raises DuplicateRequestError if there is one under its request id, InvalidRequestError if the key was used for
        another call, UnavailableError if the store does not answer soon.
        """
        digest = digest_of(call)
        writer = await self._calls.ask(lambda: self._create(live, digest), lambda writer: self._forget(live, writer))
        if writer is not None:
            live.pen = Pen(writer)
            return None
        if not call.idempotency_key:
            raise DuplicateRequestError(f"request_id: {live.request.request_id} is that of a resumable answer")
        adopted = await self._take_over(live.fleet_id)
        if adopted is None:  # forgotten between the two
            return await self.begin(live, call)
        if adopted.digest != digest:
            raise InvalidRequestError.of_field("idempotency_key", "was used for another request")
        return self._unpacked(live.request.tenant, live.request.request_id, adopted)

    async def adopt(self, tenant: Tenant, request_id: str) -> Resumed:
        """Takes over a resumable request.

        Raises NotFoundError if there is none (any more), UnavailableError if the store does not answer soon.
        """
        fleet_id = fleet_request_id(tenant.tenant_id, request_id)
        # Asked first whether it is there: taking over ends the present run, and must not come late, for nobody.
        is_there = await self._calls.ask(lambda: self._journal.writer_of(fleet_id)) is not None
        adopted = await self._take_over(fleet_id) if is_there else None
        if adopted is None:
            raise NotFoundError("request_id: no resumable answer of this tenant has it")
        return self._unpacked(tenant, request_id, adopted)

    async def _create(self, live: LiveRequest, digest: str) -> int | None:
        try:
            return await self._journal.create(live.fleet_id, request=_packed(live.request), digest=digest)
        except UnavailableError as error:
            self._store.failed(error)
            raise

    async def _forget(self, live: LiveRequest, writer: int | None) -> None:
        if writer is not None:
            await self._journal.forget(live.fleet_id, writer)

    async def _take_over(self, fleet_id: str) -> Adopted | None:
        try:
            return await self._journal.adopt(fleet_id)
        except UnavailableError as error:
            self._store.failed(error)
            raise

    async def end(self, live: LiveRequest) -> None:
        """Writes what is left; forgets a request that was never accepted."""
        if live.pen is None:
            return
        if live.lifecycle.outcome == finished(FinishReason.CANCELLED):
            live.pen.unwritten.finish_reason = FinishReason.CANCELLED
        with self._store.watched():
            if live.is_enqueued:
                await live.pen.write(self._journal, live.fleet_id)
            elif live.num_prior_tokens == 0:
                await live.pen.forget(self._journal, live.fleet_id)

    async def stop(self) -> None:
        """Closes the journal."""
        await self._journal.close()

    async def _loop(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(_FLUSH_S)
            await self.flush(checks_all=number % _ROUNDS_PER_CHECK == 0)

    async def flush(self, *, checks_all: bool) -> None:
        """Writes what live requests have got since the last time; ends those that run elsewhere now."""
        with self._store.watched():
            for live in self._dispatcher.live:
                if live.pen is None or live.lifecycle.is_ended:
                    continue
                is_mine = await live.pen.write(self._journal, live.fleet_id)
                if not is_mine or (checks_all and not await self.is_mine(live)):
                    live.end(finished(FinishReason.CANCELLED))

    async def is_mine(self, live: LiveRequest) -> bool:
        """Whether no other run has taken over a resumable request. Raises UnavailableError."""
        return live.pen is None or await live.pen.is_mine(self._journal, live.fleet_id)

    def _unpacked(self, tenant: Tenant, request_id: str, adopted: Adopted) -> Resumed:
        fields = json.loads(adopted.request)
        sampling = fields["sampling"]
        for name in ("stop_token_ids", "logit_bias"):
            sampling[name] = tuple(tuple(it) if isinstance(it, list) else it for it in sampling[name])
        request = ReadyRequest(
            request_id=request_id,
            tenant=tenant,
            band=Band(fields["band"]),
            model=self._fleet.find_model(fields["model"]),
            prompt_token_ids=tuple(fields["prompt_token_ids"]),
            sampling=SamplingParams(**sampling),
            stop=tuple(fields["stop"]),
            return_token_ids=fields["return_token_ids"],
        )
        return Resumed(request, adopted.writer, adopted.answer)


def key_request_id(idempotency_key: str) -> str:
    """The request id of everything that is asked with this key."""
    return "key-" + hashlib.sha256(idempotency_key.encode()).hexdigest()[:40]


def digest_of(call: GenerateCall) -> str:
    """Equal for equal wishes, whatever they are called."""
    content = replace(call, request_id="", idempotency_key="", is_resumable=True)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _packed(request: ReadyRequest) -> str:
    return json.dumps(
        {
            "model": request.model.limits.model,
            "band": int(request.band),
            "prompt_token_ids": request.prompt_token_ids,
            "sampling": asdict(request.sampling),
            "stop": request.stop,
            "return_token_ids": request.return_token_ids,
        },
        separators=(",", ":"),
    )
