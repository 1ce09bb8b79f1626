"""The queue in Redis: every method runs one script, which alone decides and commits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import (
    DuplicateRequestError,
    LimitExceededError,
    QuotaViolation,
    TidegateError,
    UnavailableError,
)
from common.types import Band
from gateway.queueing.queue import (
    Claim,
    Flow,
    FlowDepth,
    InboxMessage,
    Place,
    Position,
    QueueDepth,
    QueueEntry,
    WorkerRecord,
    WorkerReport,
)
from gateway.store.connection import Argument, Link, Trunk, microseconds, read_script, text
from gateway.store.inbox import Inbox
from gateway.store.keys import PoolKeys

_SCRIPT_NAMES = (
    "enqueue",
    "requeue",
    "charge",
    "finish",
    "owner_of",
    "send_cancel",
    "announce",
    "workers",
    "reach",
    "forget_worker",
    "heartbeat",
    "leave",
    "depths",
    "flow_depths",
    "position",
)
_PRELUDES = ("clock", "common", "flows")
_ALREADY_LIVE = -1
_BAND_FULL = -2
_TENANT_FULL = -3
_NOT_RESERVED = -4
_NO_LIMIT = 2**53


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the queue; all gateways of a pool should use the same."""

    claim_lease_s: float = 10.0  # a claim that no report accounts for is undone after this long
    report_ttl_s: float = 5.0  # a worker silent for this long has no credit
    owner_ttl_s: float = 10.0  # how long a gateway that enqueues before its first heartbeat is taken to live
    max_overtakes: int = 16  # how often a head that does not fit is overtaken before a worker is kept free for it
    max_passed: int = 32  # how many heads that do not fit where there is credit are looked past in one dispatch
    input_weight: int = 1  # of an input token in the service that a flow has got
    output_weight: int = 2  # of an output token
    normal_share: float = 0.1  # least share of the normal band in the tokens served, while it and a higher one wait
    low_share: float = 0.05  # the same for the low band
    normal_headroom: float = (
        0.0  # part of a worker's slots and blocks that the normal band leaves free for the high one
    )
    low_headroom: float = 0.0  # the same for the low band; claims by share or by wait need leave nothing
    max_owed_tokens: int = 20_000  # weighted tokens of its share that a band can save up
    prefix_weight: float = 0.25  # how much freer a worker counts, by share, that has all of a request's input cached
    long_wait_s: float = 60.0  # after this long a request's turn may come by its wait, whatever its band and flow
    claims_per_long_wait: int = 32  # of so many claims, one goes to the longest wait if that is long
    timeout_s: float = 5.0  # for connecting, and for each reply


class RedisQueue:
    """The `Queue` of one gateway on a Redis server. Made without I/O; belongs to one event loop.

    A cancelled call still runs to its end, so no reply can reach another caller; a cancelled enqueue is withdrawn.
    A request whose enqueue or finish got no answer from the store is removed with the next heartbeat.
    """

    def __init__(
        self,
        store: str | Trunk,
        *,
        pool: str,
        gateway_id: str,
        settings: QueueSettings | None = None,
        read_script: Callable[[str], str] = read_script,
    ) -> None:
        """`store`: its URL, or a connection that is shared; `read_script` gives the text of a script by its name."""
        self._settings = settings or QueueSettings()
        self._gateway_id = gateway_id
        self._keys = PoolKeys(pool)
        self._pool_keys = self._keys.pool_keys()
        bounds = self._settings
        self._link = Link(store, timeout_s=bounds.timeout_s)
        self._inbox = Inbox(
            store if isinstance(store, str) else store.url, self._keys.inbox(gateway_id), timeout_s=bounds.timeout_s
        )
        self._scripts = {name: self._link.script(name, _PRELUDES, read_script) for name in _SCRIPT_NAMES}
        self._scripts["dispatch"] = self._link.script("dispatch", (*_PRELUDES, "credit"), read_script)
        self._policy: tuple[Argument, ...] = (
            gateway_id,
            microseconds(bounds.report_ttl_s),
            microseconds(bounds.claim_lease_s),
            bounds.max_overtakes,
            bounds.max_passed,
            bounds.input_weight,
            bounds.output_weight,
            round(bounds.normal_share * 1000),
            round(bounds.low_share * 1000),
            bounds.max_owed_tokens,
            microseconds(bounds.long_wait_s),
            bounds.claims_per_long_wait - 1,
            round(bounds.normal_headroom * 1000),
            round(bounds.low_headroom * 1000),
            round(bounds.prefix_weight * 1000),
        )
        self._live: set[str] = set()  # enqueued here and not finished
        self._doubtful: set[str] = set()  # the store may hold them, and must not

    def __repr__(self) -> str:
        return f"RedisQueue(pool={self._keys.pool}, gateway={self._gateway_id}, live={len(self._live)})"

    def enqueue(
        self, entry: QueueEntry, *, max_length: int, max_of_tenant: int | None = None, if_reserved: bool = False
    ) -> asyncio.Future[bool]:
        """Adds a request at the end of its flow. See `Queue.enqueue`; the caller must not finish a duplicate."""
        arguments: list[Argument] = [
            entry.request_id,
            entry.owner,
            entry.model,
            int(entry.band),
            entry.tenant,
            entry.weight,
            entry.num_input_tokens,
            entry.num_tokens_needed,
            max_length,
            _NO_LIMIT if max_of_tenant is None else max_of_tenant,
            microseconds(self._settings.owner_ttl_s),
            entry.attempt,
            int(entry.is_resumed),
            _cached_blocks(entry),
            int(if_reserved),
        ]
        entering: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        refusals = {_BAND_FULL: max_length, _TENANT_FULL: max_of_tenant or 0}

        def send() -> None:
            reply = self._send_for(entry.request_id, "enqueue", *arguments)
            reply.add_done_callback(lambda reply: self._decide(entry, refusals, reply, entering))

        if entry.request_id in self._doubtful:  # an earlier try of it may have reached the store
            self._link.start(self._send_anew(entry.request_id, send, entering))
        else:
            send()
        return entering

    async def _send_anew(self, request_id: str, send: Callable[[], None], entering: asyncio.Future[bool]) -> None:
        self._doubtful.discard(request_id)
        try:
            await self._finish(request_id, "")
        except UnavailableError as error:
            if not entering.done():
                entering.set_exception(error)
        else:
            send()

    def _decide(
        self,
        entry: QueueEntry,
        limits: Mapping[int, int],
        reply: asyncio.Future[int],
        entering: asyncio.Future[bool],
    ) -> None:
        """What has become of an enqueue. One whose caller was cancelled is undone, and no later one of the same id."""
        if reply.cancelled():
            return
        error = reply.exception()
        arrival = _ALREADY_LIVE if error is not None else reply.result()
        if arrival >= 0 and entering.cancelled():
            self._finish(entry.request_id, str(arrival))
        if entering.done():
            return
        if arrival >= 0:
            self._live.add(entry.request_id)
            self._doubtful.discard(entry.request_id)
        if arrival >= 0 or arrival == _NOT_RESERVED:
            entering.set_result(arrival != _NOT_RESERVED)
        else:
            entering.set_exception(error or _refusal(entry, arrival, limits))
            entering.exception()  # seen: whoever asked may have gone meanwhile

    def dispatch(self, reports: Sequence[WorkerReport] = ()) -> asyncio.Future[list[Claim]]:
        """Takes in reports, then claims requests in policy order while some worker has credit. See `Queue.dispatch`.

        What was sent before goes with it, at once unless many calls are under way.
        """
        arguments: list[Argument] = [*self._policy, len(reports)]
        for report in reports:
            arguments += _report_arguments(report)
        return self._send("dispatch", *arguments, at_once=True, read=_claims)

    async def requeue(self, entry: QueueEntry, *, attempt: int, place: Place) -> bool:
        """Undoes a claim: the request waits again. See `Queue.requeue`."""
        renewed = (entry.num_input_tokens, entry.num_tokens_needed, _cached_blocks(entry))
        return bool(await self._run("requeue", entry.request_id, self._gateway_id, attempt, place.value, *renewed))

    async def charge(self, output_tokens: Mapping[Flow, int]) -> None:
        """Counts tokens that were made for flows since the last call. See `Queue.charge`."""
        arguments: list[Argument] = [self._settings.output_weight]
        for flow, num_tokens in output_tokens.items():
            arguments += [flow.model, int(flow.band), flow.tenant, num_tokens]
        await self._run("charge", *arguments)

    def finish(self, request_id: str) -> asyncio.Future[bool]:
        """Removes every trace of a request of this gateway. See `Queue.finish`."""
        return self._finish(request_id, "")

    def _finish(self, request_id: str, arrival: str) -> asyncio.Future[bool]:
        self._live.discard(request_id)
        return self._send_for(request_id, "finish", request_id, self._gateway_id, arrival, read=bool)

    async def owner_of(self, request_id: str) -> str | None:
        """The gateway that holds the request's stream, or None."""
        owner = await self._run("owner_of", request_id)
        return text(owner) if owner is not None else None

    async def send_cancel(self, request_id: str) -> bool:
        """Puts a cancel into the inbox of the request's owner. False if there is no such request."""
        return bool(await self._run("send_cancel", request_id))

    async def read_inbox(self, *, timeout_s: float) -> list[InboxMessage]:
        """This gateway's new messages, each returned once, in order; waits up to timeout_s for the first."""
        return [self._message(fields) for fields in await self._inbox.read(timeout_s=timeout_s)]

    def _message(self, fields: dict[str, str]) -> InboxMessage:
        request_id, kind = fields["request_id"], fields["kind"]
        if kind != "claim":
            return InboxMessage(kind, request_id)
        claim = _claim(request_id, self._gateway_id, fields["worker"], fields["epoch"], fields["attempt"])
        return InboxMessage(kind, request_id, claim)

    async def announce(self, worker: WorkerRecord, *, ttl_s: float) -> None:
        """Makes a worker known for ttl_s. An older epoch than the known one is ignored."""
        announcement = {
            "epoch": str(worker.epoch),
            "address": worker.address,
            "model": worker.model,
            "draining": worker.draining,
        }
        await self._run("announce", worker.worker_id, worker.epoch, microseconds(ttl_s), json.dumps(announcement))

    async def workers(self) -> list[WorkerRecord]:
        """All workers whose announcement has not expired, by id."""
        reply = await self._run("workers")
        return [
            _worker_record(text(worker), json.loads(known))
            for worker, known in zip(reply[::2], reply[1::2], strict=True)
        ]

    async def reach(self, worker_ids: Collection[str], *, ttl_s: float) -> None:
        """Says which workers this gateway can submit to. See `Queue.reach`."""
        await self._run("reach", self._gateway_id, microseconds(ttl_s), *worker_ids)

    async def forget_worker(self, worker_id: str, *, epoch: int) -> None:
        """Removes a lost worker's numbers and so its credit, unless a newer epoch is known."""
        await self._run("forget_worker", worker_id, epoch)

    async def heartbeat(self, *, ttl_s: float) -> list[str]:
        """Says that this gateway lives for ttl_s more, and reaps what others left. See `Queue.heartbeat`."""
        believed = sorted(self._live)
        unknown = [text(it) for it in await self._run("heartbeat", self._gateway_id, microseconds(ttl_s), *believed)]
        for request_id in sorted(self._doubtful - self._live):
            if request_id in self._doubtful:  # and has not been enqueued anew since the last of these was sent
                self._doubtful.discard(request_id)
                await self.finish(request_id)
        return [request_id for request_id in unknown if request_id in self._live]

    async def depths(self) -> list[QueueDepth]:
        """Waiting requests and the oldest head's wait, by band."""
        reply = await self._run("depths")
        return [QueueDepth(band, reply[2 * i], reply[2 * i + 1] / 1e6) for i, band in enumerate(Band)]

    async def flow_depths(self) -> list[FlowDepth]:
        """Waiting requests by flow, in the order of their turns."""
        return [
            FlowDepth(
                Flow(text(model), Band(band), text(tenant)), length, wait / 1e6, float(counter) / 100, int(weight)
            )
            for band, model, tenant, length, wait, counter, weight in await self._run("flow_depths")
        ]

    async def position(self, request_id: str) -> Position | None:
        """Where a request stands; None if it does not wait in the queue."""
        reply = await self._run("position", request_id)
        return Position(*reply) if reply else None

    async def close(self) -> None:
        """Removes this gateway's own keys, and requests if any are left, and closes connections."""
        await self._link.finish_steps()
        try:
            await self._run("leave", self._gateway_id)
        finally:
            await self._inbox.close()
            await self._link.close()

    async def _run(self, name: str, *arguments: Argument) -> Any:
        return await self._send(name, *arguments)

    def _send(
        self, name: str, *arguments: Argument, at_once: bool = False, read: Callable[[Any], Any] | None = None
    ) -> asyncio.Future[Any]:
        keys, with_prefix = self._pool_keys, (self._keys.prefix, *arguments)
        return self._link.send(self._scripts[name], keys, with_prefix, at_once=at_once, read=read)

    def _send_for(
        self,
        request_id: str,
        name: str,
        *arguments: Argument,
        read: Callable[[Any], Any] | None = None,
    ) -> asyncio.Future[Any]:
        """Sends what changes a request; without an answer, be there still a caller or not, it is in doubt."""

        def note(reply: asyncio.Future[Any]) -> None:
            if not reply.cancelled() and isinstance(reply.exception(), UnavailableError):
                self._doubtful.add(request_id)

        reply = self._send(name, *arguments, read=read)
        reply.add_done_callback(note)
        return reply


def _claims(reply: Sequence[Sequence[Any]]) -> list[Claim]:
    return [_claim(*(text(field) for field in claim)) for claim in reply]


def _refusal(entry: QueueEntry, arrival: int, limits: Mapping[int, int]) -> TidegateError:
    """Of the store, which said `arrival`."""
    if arrival == _ALREADY_LIVE:
        return DuplicateRequestError("a request with this id is being served")
    if arrival == _BAND_FULL:
        band = entry.band.name.lower()
        return LimitExceededError(f"the queue of the {band} band is full ({limits[arrival]} waiting)")
    message = f"the tenant has {limits[arrival]} waiting requests, the most that is allowed"
    return LimitExceededError(message, quotas=[QuotaViolation(f"tenant:{entry.tenant}", message)])


def _cached_blocks(entry: QueueEntry) -> str:
    return json.dumps(dict(entry.cached_blocks)) if entry.cached_blocks else ""


def _report_arguments(report: WorkerReport) -> list[Argument]:
    limits, usage = report.limits, report.usage
    arguments: list[Argument] = [
        report.worker_id,
        report.epoch,
        usage.seq,
        limits.model,
        limits.block_size,
        limits.num_blocks,
        limits.max_num_seqs,
        usage.free_slots,
        usage.free_blocks,
        len(usage.accounted),
    ]
    for claim in usage.accounted:
        arguments += [claim.request_id, claim.attempt]
    return arguments


def _claim(request_id: str, owner: str, worker_id: str, epoch: str, attempt: str) -> Claim:
    return Claim(request_id, owner, worker_id, int(epoch), int(attempt))


def _worker_record(worker_id: str, known: dict[str, Any]) -> WorkerRecord:
    return WorkerRecord(worker_id, int(known["epoch"]), known["address"], known["model"], known["draining"])
