"""The port of the fleet's one queue: who waits, who is claimed by which worker, who lives."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from common.types import Band, BlockUsage, ModelLimits


class Flow(NamedTuple):
    """The work of a tenant in a band, on the workers of a model: what fairness is measured by.

    A key of what is counted with every token: a tuple's hash costs a third of a frozen class's.
    """

    model: str
    band: Band
    tenant: str


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request as the queue knows it: no prompt, only what ordering and placement need."""

    request_id: str  # unique in the fleet: contains the tenant
    owner: str  # id of the gateway that holds the client's stream
    model: str
    tenant: str
    band: Band
    num_input_tokens: int  # tokens to compute before the first new one
    num_tokens_needed: int  # tokens of KV to reserve as credit when claimed
    weight: int = 1  # of the tenant, at least 1: backlogged flows of a band are served in proportion to it
    attempt: int = 0  # of its last claim, if the queue has lost it and it is enqueued again
    is_resumed: bool = False  # goes on with an answer that was begun: in the first place of its flow
    # By worker, leading blocks of its input that the owner believes cached there; none for workers that are left out.
    cached_blocks: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def flow(self) -> Flow:
        """Whose service it counts as."""
        return Flow(self.model, self.band, self.tenant)


class Place(Enum):
    """Where in its flow a requeued request goes."""

    FIRST = "first"  # its worker was lost: ahead of fresh work
    SAME = "same"  # a worker had no room: at its own arrival position, and what the claim counted is taken back
    LAST = "last"  # a worker handed back what ran long: behind fresh work, until its wait is long


@dataclass(frozen=True, slots=True)
class Claim:
    """The queue's decision that a worker takes a request."""

    request_id: str
    owner: str
    worker_id: str
    worker_epoch: int
    attempt: int  # from 1, grows with every claim of the request


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker said about its pool, as stored for dispatch."""

    worker_id: str
    epoch: int
    limits: ModelLimits
    usage: BlockUsage


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """An announced worker."""

    worker_id: str
    epoch: int
    address: str
    model: str
    draining: bool


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """Something another gateway asks the owner of a request to do."""

    kind: str  # "claim" or "cancel"
    request_id: str
    claim: Claim | None = None


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Waiting requests of one band, and how long the longest-waiting of them has waited."""

    band: Band
    num_waiting: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class FlowDepth:
    """Waiting requests of one flow, and what it has been served."""

    flow: Flow
    num_waiting: int
    oldest_wait_s: float
    served: float  # weighted tokens by its weight: of a band's flows the one with the least is next
    weight: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a waiting request stands."""

    num_ahead_in_flow: int
    num_flows_first: int  # of its band, that have been served less
    num_waiting_above: int  # requests of its model in higher bands
    num_overtaken: int  # times that a later one was claimed as this one did not fit


class Entering(Awaitable[bool], Protocol):
    """An enqueue that was sent: a future of what comes of it."""

    def done(self) -> bool:
        """Whether that is known."""
        ...

    def cancel(self) -> bool:
        """Undoes it, if that is not known yet."""
        ...

    def cancelled(self) -> bool:
        """Whether it was undone."""
        ...

    def exception(self) -> BaseException | None:
        """Why it failed."""
        ...

    def result(self) -> bool:
        """Whether it entered. Raises `exception`."""
        ...


class Queue(Protocol):
    """One queue for the whole fleet. Every method is one atomic change; all raise UnavailableError(STORE_UNAVAILABLE)
    when the store cannot be reached. The store's clock is the only clock."""

    def enqueue(
        self, entry: QueueEntry, *, max_length: int, max_of_tenant: int | None = None, if_reserved: bool = False
    ) -> Entering:
        """Adds a request at the end of the fresh work of its flow, or of the resumed work. Sent by the call itself.

        False, and nothing is written, if it is to be added only with a reservation of its tenant's limits and has none:
        so a caller need not wait for the answer of the limiter first, if both are in one store.
        Raises DuplicateRequestError if a live request has the id and LimitExceededError(QUEUE_FULL) if its band
        already holds `max_length` waiting requests, or all bands together `max_of_tenant` of its tenant; either way
        nothing is written, and the caller must not finish it.
        One cancelled before its answer has come is withdrawn; one whose outcome the store did not tell may be repeated,
        and is else removed with the next heartbeat.
        """
        ...

    def dispatch(self, reports: Sequence[WorkerReport] = ()) -> Awaitable[list[Claim]]:
        """Takes in workers' reports, then claims requests in policy order while some worker has credit.

        The order: bands by priority, but a lower one gets its least share of the tokens served; inside a band the flow
        that was served least for its weight; inside a flow by place. Now and then the longest wait comes first.

        A request goes to a worker that has room for it and that its owner reaches: the one with the most of its slots
        and blocks free, where a worker that is believed to have the request's input cached counts as a little freer.

        Reports older than the stored (epoch, seq) change no numbers; the claims that a report accounts for are
        forgotten either way once the stored numbers contain them. Returns the claims made for requests of every owner;
        claims of other owners are also put into their inbox, so the caller acts only on its own.

        Sent by the call itself, behind what was sent before; to be awaited for the answer.
        """
        ...

    async def requeue(self, entry: QueueEntry, *, attempt: int, place: Place) -> bool:
        """Undoes a claim: the request waits again, with the tokens and cached blocks that the entry says now.

        False (and no change) if that attempt is not this gateway's present claim: another is, or the request waits
        already, its lease having passed.
        """
        ...

    async def charge(self, output_tokens: Mapping[Flow, int]) -> None:
        """Counts tokens that were made for flows since the last call. A call whose outcome the store did not tell may
        be repeated: it then counts twice, which costs the flow a few turns, and no request."""
        ...

    def finish(self, request_id: str) -> Awaitable[bool]:
        """Removes every trace of a request of this gateway, waiting or claimed. False if there was none. Idempotent.

        Sent by the call itself, and to be awaited for the answer. One that the store did not answer is repeated with
        the next heartbeat.
        """
        ...

    async def owner_of(self, request_id: str) -> str | None:
        """The gateway that holds the request's stream, or None."""
        ...

    async def send_cancel(self, request_id: str) -> bool:
        """Puts a cancel into the inbox of the request's owner. False if there is no such request."""
        ...

    async def read_inbox(self, *, timeout_s: float) -> list[InboxMessage]:
        """This gateway's new messages, each returned once, in order; waits up to timeout_s for the first."""
        ...

    async def announce(self, worker: WorkerRecord, *, ttl_s: float) -> None:
        """Makes a worker known for ttl_s. An older epoch than the known one is ignored."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """All workers whose announcement has not expired."""
        ...

    async def reach(self, worker_ids: Collection[str], *, ttl_s: float) -> None:
        """Says which workers this gateway can submit to: claims of its requests are made on these only, for as long as
        it lives. A gateway that has never said so, or not for ttl_s, is taken to reach all."""
        ...

    async def forget_worker(self, worker_id: str, *, epoch: int) -> None:
        """Removes a lost worker's numbers and so its credit, unless a newer epoch is known."""
        ...

    async def heartbeat(self, *, ttl_s: float) -> list[str]:
        """Says that this gateway lives for ttl_s more, and reaps what dead gateways and expired claims left.

        Returns ids of this gateway's requests that the queue does not know (it lost them, or another gateway reaped
        them): the caller enqueues again those that wait.
        """
        ...

    async def depths(self) -> list[QueueDepth]:
        """Waiting requests and oldest wait by band."""
        ...

    async def flow_depths(self) -> list[FlowDepth]:
        """Waiting requests by flow: by model and band, in the order of their turns."""
        ...

    async def position(self, request_id: str) -> Position | None:
        """Where a request stands; None if it does not wait in the queue."""
        ...

    async def close(self) -> None:
        """Removes this gateway's own keys (heartbeat, inbox) and closes connections."""
        ...
