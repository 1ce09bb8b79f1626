"""What two snapshots say about the time between them, as the figures that the questions are answered by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.doctor.snapshot import WORKER, Snapshot

LIMIT_REASONS = ("REQUEST_RATE", "TOKEN_RATE", "CONCURRENCY", "DAILY_BUDGET")
"""Of refusals that a tenant's limits cause."""


class FactsError(ValueError):
    """Snapshots that do not belong together; the message says why."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How the workers were started; where they differ, the mean."""

    max_num_seqs: float
    max_num_batched_tokens: float
    step_budget_s: float
    first_chunk_s: float

    @classmethod
    def of(cls, snapshot: Snapshot) -> Bounds:
        """As the workers tell them. Raises FactsError if one does not."""
        names = ("max_num_seqs", "max_num_batched_tokens", "step_budget_seconds", "first_chunk_seconds")
        for name in names:
            if not all(reading.has(WORKER + name) for reading in snapshot.workers):
                raise FactsError(f"a worker does not tell its {name}: it runs another version of this program")
        return cls(*(_ratio(snapshot.worker_total(name), len(snapshot.workers)) for name in names))


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of the whole fleet over the interval; shares are 0 to 1, means are over steps unless said otherwise."""

    interval_s: float
    busy_share: float  # of the workers' time, that in which a step ran
    steps_per_s: float
    step_s: float  # mean duration
    rows_per_step: float
    tokens_per_step: float
    chunk_share: float  # of the computed tokens, those of prompts (first and further chunks)
    num_chunks: float  # rows that computed a chunk
    further_share: float  # of these, chunks after a request's first
    tokens_per_chunk: float
    first_chunk_wait_s: float  # mean over requests, from arrival at the worker
    referenced_share: float  # of the KV blocks, those that somebody holds: mean of the two snapshots
    running: float  # mean of the two snapshots, as the two below
    waiting: float  # at workers
    queued: float  # at gateways
    queue_wait_s: float  # mean over requests that left the queue
    num_preempted: float  # for memory: without those that made way for a newcomer
    num_overtakes: float  # admissions before an earlier request that waits for memory
    num_requests: float  # that reached a gateway and ended, refusals included
    limited: dict[str, float]  # refusals by a tenant's limits, by reason, those that happened

    @property
    def num_limited(self) -> float:
        """Refusals by tenants' limits."""
        return sum(self.limited.values())

    @property
    def limited_share(self) -> float:
        """Of the requests, those that tenants' limits refused."""
        return self.num_limited / self.num_requests if self.num_requests else 0.0

    @property
    def num_waiting(self) -> float:
        """Requests that have no slot yet, wherever they wait."""
        return self.waiting + self.queued


def derive(before: Snapshot, after: Snapshot) -> Facts:
    """The facts of the interval. Raises FactsError if it is none, or if a program was restarted in it."""
    interval_s = after.at_s - before.at_s
    _check(before, after, interval_s)

    def worker(name: str, *labels: str) -> float:
        if labels:
            return after.worker_labelled(name, *labels) - before.worker_labelled(name, *labels)
        return after.worker_total(name) - before.worker_total(name)

    def gateway(name: str, *labels: str) -> float:
        if labels:
            return after.gateway_labelled(name, *labels) - before.gateway_labelled(name, *labels)
        return after.gateway_total(name) - before.gateway_total(name)

    def between(value: Callable[[Snapshot], float]) -> float:
        return (value(before) + value(after)) / 2

    num_steps = worker("step_seconds_count")
    busy_s, num_tokens = worker("step_seconds_sum"), worker("step_tokens_sum")
    num_decodes = worker("step_rows_total", "decode") + worker("step_rows_total", "long_decode")
    num_further = worker("step_rows_total", "further_chunk")
    num_chunks = worker("step_rows_total", "first_chunk") + num_further
    limited = {reason: count for reason in LIMIT_REASONS if (count := gateway("rejected_total", reason)) > 0}
    return Facts(
        interval_s=interval_s,
        busy_share=_ratio(busy_s, interval_s * len(after.workers)),
        steps_per_s=num_steps / interval_s,
        step_s=_ratio(busy_s, num_steps),
        rows_per_step=_ratio(worker("batch_size_sum"), num_steps),
        tokens_per_step=_ratio(num_tokens, num_steps),
        chunk_share=_ratio(num_tokens - num_decodes, num_tokens),
        num_chunks=num_chunks,
        further_share=_ratio(num_further, num_chunks),
        tokens_per_chunk=_ratio(num_tokens - num_decodes, num_chunks),
        first_chunk_wait_s=_ratio(worker("first_chunk_wait_seconds_sum"), worker("first_chunk_wait_seconds_count")),
        referenced_share=between(_referenced_share),
        running=between(lambda snapshot: snapshot.worker_total("running")),
        waiting=between(lambda snapshot: snapshot.worker_total("waiting")),
        queued=between(lambda snapshot: snapshot.queued),
        queue_wait_s=_ratio(gateway("queue_wait_seconds_sum"), gateway("queue_wait_seconds_count")),
        num_preempted=max(0.0, worker("preemptions_total") - worker("yielded_total")),
        num_overtakes=worker("overtakes_total"),
        num_requests=gateway("requests_total"),
        limited=limited,
    )


def _check(before: Snapshot, after: Snapshot, interval_s: float) -> None:
    if interval_s <= 0:
        raise FactsError(f"the second snapshot is {-interval_s:g} s before the first")
    if not after.workers:
        raise FactsError("no worker was looked at: give the endpoint of at least one")
    if (len(before.workers), len(before.gateways)) != (len(after.workers), len(after.gateways)):
        raise FactsError("the two snapshots are of different deployments")
    pairs = [*zip(before.workers, after.workers, strict=True), *zip(before.gateways, after.gateways, strict=True)]
    for earlier, later in pairs:
        for name, series in earlier.samples.items():
            if name.endswith(("_total", "_count")) and any(
                value > later.labelled(name, *labels) for labels, value in series.items()
            ):
                raise FactsError(f"{name} went down: a program was restarted between the snapshots, look again")


def _referenced_share(snapshot: Snapshot) -> float:
    """Swapping blocks are held, too."""
    held = snapshot.worker_labelled("blocks", "referenced") + snapshot.worker_labelled("blocks", "swapping")
    return _ratio(held, snapshot.worker_total("blocks"))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
