"""One request while the gateway holds its client's stream: what it is, where it runs, what it has produced."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from common.types import Band, SamplingParams, Usage
from common.window import salt_of
from gateway.admission.limits import Remaining
from gateway.journal import Pen
from gateway.lifecycle import Lifecycle, Outcome, RequestState
from gateway.mailbox import Mailbox
from gateway.placement.model import ServedModel
from gateway.placement.scoring import Belief, Prefix
from gateway.placement.worker import Submission, TokensEvent
from gateway.queueing.queue import Claim, Entering, Flow, QueueEntry
from gateway.tenants import Tenant


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """Checked, tokenized, with every default filled in."""

    request_id: str  # the client's, or chosen by the gateway
    tenant: Tenant
    band: Band
    model: ServedModel
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    return_token_ids: bool

    @property
    def fleet_id(self) -> str:
        """Unique in the fleet."""
        return fleet_request_id(self.tenant.tenant_id, self.request_id)

    @property
    def prefix_salt(self) -> str:
        """Workers find what it begins with only in blocks of requests with the same one."""
        return salt_of(self.tenant.cache_salt, self.sampling.window)

    @property
    def flow(self) -> Flow:
        """Whose service its tokens are."""
        return _flow(self.model.limits.model, self.band, self.tenant.tenant_id)


@lru_cache(maxsize=4096)
def _flow(model: str, band: Band, tenant: str) -> Flow:
    """One object for each flow: a dictionary finds it, which is done for every token, without comparing fields."""
    return Flow(model, band, tenant)


def fleet_request_id(tenant_id: str, request_id: str) -> str:
    """The id of a tenant's request inside the fleet."""
    return f"{tenant_id}/{request_id}"


class LiveRequest:
    """Owned by its handler; the dispatcher writes claim, output and mailbox. All on one event loop."""

    def __init__(self, request: ReadyRequest, arrived: float) -> None:
        """`arrived`: monotonic seconds."""
        self.request = request
        self.fleet_id = request.fleet_id
        self.flow = request.flow
        self.lifecycle = Lifecycle()
        self.mailbox = Mailbox()
        self.claim: Claim | None = None
        self.output_token_ids: list[int] = []  # of all attempts, as received
        self.cached_prompt_tokens = 0
        self.num_attempts = 0
        self.num_recomputed_tokens = 0
        self.is_resumed = False  # a former run of it has ended, or must
        self.num_prior_tokens = 0  # of the output, by former runs of a resumable request
        self.num_delivered_tokens = 0  # of the output, handed to the client's stream
        self.pen: Pen | None = None  # of the journal, if it is resumable
        self.is_forgotten = asyncio.Event()  # ended, and its id is free here
        self.num_losses = 0
        self.num_hand_backs = 0  # by workers short of memory
        self.deadline: float | None = None  # when its client gives up, in monotonic seconds
        self.is_paused = False  # at its worker, until its client has read more
        self.record_id = ""  # in the ledger, once it is accepted
        self._heard_attempt = 0  # the latest that has made a token
        self.num_refusals = 0  # in a row, by workers without room
        self.prefix = Prefix(request.prompt_token_ids, request.prefix_salt)  # of its input in the present attempt
        self.belief: Belief | None = None  # what its worker was thought to have cached of that, until it says so
        self.last_attempt = 0
        self.is_generated = False  # a worker has said its last word, which the client may not have read yet
        self.is_reserved = False
        self.remaining = Remaining()  # of the tenant's limits, when it was reserved
        self.is_enqueued = False
        self.entering: Entering | None = None  # its enqueue, sent before it was known to be reserved
        self.admission: asyncio.Task[None] | None = None
        self.closing: asyncio.Task[None] | None = None
        self.arrived = arrived
        self.accepted_at = arrived  # queued first
        self.queued_at = arrived  # queued last
        self.taken_at: float | None = None  # by a worker, first
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    def __repr__(self) -> str:
        return f"LiveRequest({self.fleet_id}, {self.lifecycle.state.value}, output={len(self.output_token_ids)})"

    @property
    def num_input_tokens(self) -> int:
        """Tokens that a worker has to compute before the next new one."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    def has_filled_blocks(self, num_new_tokens: int) -> bool:
        """Whether its output, with so many tokens more, has filled a block that a later request could find."""
        num_prompt_tokens, block_size = len(self.request.prompt_token_ids), self.request.model.limits.block_size
        return (self.num_input_tokens + num_new_tokens - 1) // block_size > (num_prompt_tokens - 1) // block_size

    @property
    def num_payable_prompt_tokens(self) -> int:
        """Prompt tokens that this run pays for: none, if a former run has."""
        return 0 if self.num_prior_tokens else len(self.request.prompt_token_ids)

    def queue_entry(
        self,
        owner: str,
        *,
        num_tokens_needed: int,
        cached_blocks: Mapping[str, int] | None = None,
    ) -> QueueEntry:
        """The request as the queue is to know it now."""
        return QueueEntry(
            request_id=self.fleet_id,
            owner=owner,
            model=self.request.model.limits.model,
            tenant=self.request.tenant.tenant_id,
            band=self.request.band,
            num_input_tokens=self.num_input_tokens,
            num_tokens_needed=num_tokens_needed,
            weight=self.request.tenant.weight,
            attempt=self.last_attempt,
            is_resumed=self.is_resumed or self.num_losses > 0,
            cached_blocks=cached_blocks or {},
        )

    def renew_prefix(self) -> None:
        """Its next attempt begins with what it has produced."""
        tokens = (*self.request.prompt_token_ids, *self.output_token_ids)
        self.prefix = Prefix(tokens, self.request.prefix_salt)

    def submission(self, attempt: int, now: float, *, may_hand_back: bool) -> Submission:
        """The next attempt, which goes on after the tokens received so far."""
        return Submission(
            request_id=self.fleet_id,
            attempt=attempt,
            prompt_token_ids=self.request.prompt_token_ids,
            output_token_ids=tuple(self.output_token_ids),
            sampling=self.request.sampling,
            band=self.request.band,
            cache_salt=self.request.tenant.cache_salt,
            timeout_s=0.0 if self.deadline is None else max(self.deadline - now, 0.001),
            may_hand_back=may_hand_back,
        )

    def go_on_after(self, token_ids: Sequence[int], pen: Pen) -> None:
        """A former run has made these tokens."""
        self.is_resumed = True
        self.output_token_ids.extend(token_ids)
        self.num_prior_tokens = len(token_ids)
        self.renew_prefix()
        self.pen = pen

    def enter_queue(self, now: float) -> None:
        """It waits for the first time, unless it does already: a claim may come before the store's answer does."""
        if self.lifecycle.state is RequestState.RECEIVED:
            self.lifecycle.advance(RequestState.ADMITTED)
            self.lifecycle.advance(RequestState.QUEUED)
            self.accepted_at = self.queued_at = now

    def begin(self, claim: Claim, now: float) -> None:
        """A worker is to take it."""
        self.enter_queue(now)
        if self.lifecycle.state is not RequestState.QUEUED:
            self.lifecycle.advance(RequestState.QUEUED)
        self.lifecycle.advance(RequestState.DISPATCHED)
        self.claim = claim
        self.is_paused = False
        self.last_attempt = claim.attempt
        self.num_attempts += 1
        if self.taken_at is None:
            self.taken_at = now

    def back_to_queue(self, *, queued_at: float) -> None:
        """Its claim is void: it waits again, as if since `queued_at`."""
        self.claim = None
        self.queued_at = queued_at
        if self.lifecycle.state is not RequestState.QUEUED:
            self.lifecycle.advance(RequestState.QUEUED)

    def is_running_on(self, worker_id: str, attempt: int) -> bool:
        """Whether an event of that attempt on that worker is about the present."""
        claim = self.claim
        if claim is None or claim.worker_id != worker_id or claim.attempt != attempt:
            return False
        return self.lifecycle.outcome is None

    def receive(self, event: TokensEvent, now: float) -> None:
        """Takes in new tokens of the current attempt."""
        _, attempt, token_ids, logprobs, finish_reason, num_cached = event
        if token_ids:
            self.last_token_at = now
            if attempt != self._heard_attempt:
                self._begin_to_hear(attempt, num_cached, now)
        if num_cached and not self.output_token_ids:
            # A later attempt finds tokens that this request itself has left: that is no saving to tell of.
            self.cached_prompt_tokens = min(num_cached, len(self.request.prompt_token_ids))
        self.output_token_ids.extend(token_ids)
        if self.pen is not None:
            self.pen.unwritten.add(token_ids, logprobs, finish_reason)
        if finish_reason is not None:
            self.claim = None
            self.is_generated = True
        if token_ids or finish_reason is not None:
            self.mailbox.put_tokens(token_ids, logprobs, finish_reason)

    def _begin_to_hear(self, attempt: int, num_cached: int, now: float) -> None:
        """An attempt has made its first token."""
        self._heard_attempt = attempt
        self.lifecycle.advance(RequestState.STREAMING)
        self.num_refusals = 0
        if self.first_token_at is None:
            self.first_token_at = now
        if self.output_token_ids:
            self.num_recomputed_tokens += max(self.num_input_tokens - num_cached, 0)

    def end(self, outcome: Outcome) -> None:
        """Asks the handler to end it."""
        self.mailbox.put_end(outcome)

    def usage(self, num_completion_tokens: int) -> Usage:
        """What it used so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_prompt_tokens=self.cached_prompt_tokens,
            completion_tokens=num_completion_tokens,
        )
