"""What has to be so after any harm, read from the clients' records, from Redis and from the programs themselves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import redis

from common.types import FinishReason, JobState
from gateway.store.keys import PoolKeys
from tests.chaos.cluster import MAX_CONCURRENT, POOL, REQUESTS_PER_MINUTE, Cluster
from tests.chaos.node import Span, eventually
from tests.chaos.traffic import Call, Traffic, is_whole

# What may be there without a request: what is known of workers, flows and limits, and what is kept for a while.
_LASTING = {
    *("gateways", "sequence", "announced", "announcements", "flow", "service", "worker", "serving", "reached", "inbox"),
    *(
        "window",
        "day",
        "limits",
        "shares",
        "recalled",
        "tenants",
        "tenants_version",
        "endings",
        "ending_times",
        "ledger",
        "ledger_owners",
        "ledger_reaped",
    ),
    *("journal", "passages", "job", "jobs"),
}
Record = dict[str, str]
_SETTLING_S = 120.0
_BOOKING_S = 5.0  # after which a gateway has booked what it could not, once it has its store back
_ONE_RUN = frozenset({"plain", "cancelled", "left", "late"})  # kinds of calls that never go on elsewhere


async def check_all(cluster: Cluster, traffic: Traffic, *, forgotten: Sequence[Call] = ()) -> None:
    """Every invariant, of every call of the traffic. `forgotten`: calls whose records may be lost with the store."""
    faults = []
    booked = [call for call in traffic.calls if call not in forgotten]
    for check in (
        check_nothing_left(cluster),
        check_ledger(cluster, traffic, booked),
        check_quota(cluster, traffic),
        check_answers(traffic.calls),
        check_logs(cluster),
    ):
        try:
            await check
        except AssertionError as error:
            faults.append(str(error))
    assert not faults, "\n".join(faults)


async def check_answers(calls: Sequence[Call]) -> None:
    """Each accepted request has one end, and its text is what an undisturbed run gives, or the beginning of it."""
    faults = []
    for call in calls:
        faults += [f"{call.kind} {call.tenant} #{call.number} ({call.request_id}): {fault}" for fault in _faults(call)]
    assert not faults, f"{len(faults)} of {len(calls)} calls:\n" + "\n".join(faults[:20])


def _faults(call: Call) -> list[str]:
    if call.fault:
        return [call.fault]
    if call.kind == "job":
        return _job_faults(call)
    if not call.num_streams:
        return [] if call.refusals or call.failures else ["neither accepted nor refused"]
    faults = []
    question = call.question
    ends = len(call.finished) + sum(1 for _ in call.failures) - max(call.num_streams - 1, 0)
    if call.kind != "left" and ends != 1:
        faults.append(f"{ends} ends: {call.finished} {call.failures}")
    if is_whole(call):
        if call.text != question.text:
            faults.append(f"differs from an undisturbed run at character {_difference(call.text, question.text)}")
        if tuple(call.token_ids) != question.token_ids:
            faults.append(f"tokens differ at {_difference(call.token_ids, question.token_ids)}")
        if call.finished[-1].reason is not question.reason:
            faults.append(f"ended by {call.finished[-1].reason}, not {question.reason}")
        if call.finished[-1].usage.completion_tokens != len(question.token_ids):
            faults.append(f"{call.finished[-1].usage.completion_tokens} tokens billed, not {len(question.token_ids)}")
    elif tuple(call.token_ids) != question.token_ids[: len(call.token_ids)]:
        faults.append(
            f"tokens are no beginning of an undisturbed run: {_difference(call.token_ids, question.token_ids)}"
        )
    elif not question.longest_text.startswith(
        call.text.rstrip("\ufffd")
    ):  # what there is of a cut character is told at the end
        faults.append(f"text is no beginning of an undisturbed run: {_difference(call.text, question.text)}")
    if call.kind in ("plain", "resumable", "keyed") and not is_whole(call) and not call.failures:
        faults.append(f"ended early: {call.finished}")
    if call.kind in ("resumable", "keyed") and not is_whole(call):
        faults.append(f"never came to its end: {call.finished} {call.failures} {call.refusals[-3:]}")
    return faults


def _job_faults(call: Call) -> list[str]:
    if call.job is None:
        return [] if call.refusals else ["no end"]
    if call.job.state is not JobState.DONE or call.job.result is None:
        return [f"{call.job.state.name} {call.job.reason} {call.job.message}"]
    return [] if call.job.result.text == call.question.text else ["differs from an undisturbed run"]


def _difference(got: Sequence[object], wanted: Sequence[object]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return f"{at} of {len(wanted)} ({len(got)} came)"


async def check_quota(cluster: Cluster, traffic: Traffic) -> None:
    """The limited tenant never had more requests at once, or in a minute, than it may.

    A request counts as running only while that is certain, however late its client has read: from its acceptance until
    its gateway began to give its slot back, of which the record tells; or until its first token where the record is
    made later than that. Nor does it count any more once its gateway may have been taken for dead, with which others
    get the slot.
    """
    limited = [call for call in traffic.calls if call.tenant == "limited" and call.num_streams == 1]
    records = await asyncio.to_thread(_records, cluster)
    running = []
    for call in limited:
        accepted_at = call.accepted_at
        assert accepted_at is not None
        until = call.sent_at + _certain_s(call, records[f"{call.tenant}/{call.request_id}"])
        until = min([until, *(at for at in traffic.lapses if at >= accepted_at)])
        if until > accepted_at:
            running.append((accepted_at, until, call.kind, call.request_id))
    for at, *_ in running:
        together = [each for each in running if each[0] <= at < each[1]]
        assert len(together) <= MAX_CONCURRENT, f"at once: {together}"
    spans = [(call.sent_at, call.accepted_at) for call in limited if call.accepted_at is not None]
    in_a_minute = [sum(1 for sent, accepted in spans if start <= sent and accepted < start + 60) for start, _ in spans]
    assert max(in_a_minute, default=0) <= REQUESTS_PER_MINUTE, f"{max(in_a_minute)} requests in a minute"


def _certain_s(call: Call, records: Sequence[Record]) -> float:
    """For how long after its sending a call had its slot for certain."""
    if call.kind in _ONE_RUN:
        return float(records[0]["total_s"]) if len(records) == 1 else 0.0
    return call.finished[-1].timing.ttft_s if call.finished else 0.0


async def check_nothing_left(cluster: Cluster) -> None:
    """No key of a request, no slot of a tenant, no block of a worker is still taken."""
    found: list[str] = []

    def is_clean() -> bool:
        found[:] = _left(cluster)
        return not found

    try:
        await eventually(lambda: asyncio.to_thread(is_clean), "nothing is left", _SETTLING_S)
    except AssertionError:
        raise AssertionError(f"left behind: {found}") from None


def _left(cluster: Cluster) -> list[str]:
    keys = PoolKeys(POOL)
    left = [key for key in cluster.stored_keys() if key.removeprefix(keys.prefix).split(":", 1)[0] not in _LASTING]
    with cluster.store() as client:
        left = [key for key in left if not _expires(client, key, cluster)]
        left += [f"job {name}" for name in client.zrange(keys.jobs_due, 0, -1)]
        known = {*client.zrange(keys.prefix + "gateways", 0, -1), *client.smembers(keys.ledger_owners)}
        left += [f"dead gateway {name}" for name in known.difference(cluster.gateway_ids)]
    for worker in cluster.workers:
        for name in ("running", "waiting"):
            if worker.metric(f"tidegate_worker_{name}"):
                left.append(f"{worker.node.name} {name}")
    for gateway in cluster.gateways:
        if gateway.metric("tidegate_gateway_live_streams"):
            left.append(f"{gateway.node.name} streams")
    return left


def _expires(client: redis.Redis, key: str, cluster: Cluster) -> bool:
    """Whether it is the reservation of a request that a gateway died over before it was in queue and books."""
    kind, _, request_id = key.removeprefix(PoolKeys(POOL).prefix).partition(":")
    if kind != "reservation":
        return False
    slots = PoolKeys(POOL).running(request_id.partition("/")[0])
    return client.hget(key, "owner") not in cluster.gateway_ids and client.zscore(slots, request_id) is None


def _records(cluster: Cluster) -> dict[str, list[Record]]:
    by_request: dict[str, list[Record]] = defaultdict(list)
    with cluster.store() as client:
        for _, record in client.xrange(PoolKeys(POOL).ledger):
            by_request[record["request_id"]].append(record)
    return by_request


async def check_ledger(cluster: Cluster, traffic: Traffic, calls: Sequence[Call]) -> None:
    """One record for each accepted request and run: what was delivered is what clients got, nothing counts twice.

    Gateways write what the store could not take, and replace what others have written in their place, as soon as they
    can: this waits for it.
    """
    faults: list[str] = []

    def is_right() -> bool:
        records = _records(cluster)
        faults.clear()
        for call in calls:
            if call.num_streams:
                its = records[f"{call.tenant}/{call.request_id}"]
                found = _ledger_faults(call, its, is_sure=not _may_be_lost(cluster, traffic, call))
                faults.extend(f"{call.kind} {call.request_id}: {fault}" for fault in found)
        return not faults

    try:
        await eventually(lambda: asyncio.to_thread(is_right), "the books are right", _SETTLING_S)
    except AssertionError:
        raise AssertionError(f"{len(faults)} of {len(calls)} calls:\n" + "\n".join(faults[:20])) from None


def _may_be_lost(cluster: Cluster, traffic: Traffic, call: Call) -> bool:
    """Whether its gateway was ended while it may have had something to book that it could not, as it had accepted the
    call without the store, or had ended it without."""
    return any(
        _overlap(end, span)
        and any(at is not None and span[0] <= at <= span[1] for at in (call.accepted_at, call.ended_at))
        for gateway in call.gateways
        for start, back in (*cluster.silences(gateway), *traffic.silences)
        for span in [(start, back + _BOOKING_S)]
        for end in cluster.gateways[gateway].node.ends
    )


def _overlap(one: Span, other: Span) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _ledger_faults(call: Call, records: Sequence[Record], *, is_sure: bool) -> list[str]:
    total = {
        name: sum(int(record[name]) for record in records)
        for name in ("prompt_tokens", "generated_tokens", "delivered_tokens")
    }
    has_one_run = call.kind in _ONE_RUN
    if (not records and is_sure) or (has_one_run and len(records) > 1):
        return [f"{len(records)} records"]
    faults = []
    if len({record["record_id"] for record in records}) != len(records):
        faults.append("a record twice")
    most = len(call.question.token_ids)
    if total["delivered_tokens"] > total["generated_tokens"]:
        faults.append(f"more delivered than generated: {total}")
    is_lost = not records or records[0]["outcome"] == "lost"
    if has_one_run and is_whole(call) and (is_sure or not is_lost):
        usage = call.finished[-1].usage
        if total["delivered_tokens"] != usage.completion_tokens or total["prompt_tokens"] != usage.prompt_tokens:
            faults.append(f"{total} recorded, {usage} told")
        if records[0]["outcome"] != "completed":
            faults.append(f"outcome {records[0]['outcome']}")
    if has_one_run and call.question.reason is FinishReason.LENGTH and total["generated_tokens"] > most:
        faults.append(f"{total['generated_tokens']} tokens generated, {most} asked for")
    return faults


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens that the workers have counted; those that the ledger and the gateways' late ones have; lost sessions."""

    made: int
    booked: int
    num_lost: int

    @staticmethod
    def read(cluster: Cluster) -> Counts:
        """Now. What the gateways say is read last, as the latest news are still on the way to them."""
        made = sum(int(worker.metric("tidegate_worker_output_tokens_total")) for worker in cluster.workers)
        booked = sum(int(record["generated_tokens"]) for its in _records(cluster).values() for record in its)
        late = sum(int(gateway.metric("tidegate_gateway_late_tokens_total")) for gateway in cluster.gateways)
        num_lost = sum(len(gateway.node.events("worker_gone")) for gateway in cluster.gateways)
        return Counts(made, booked + late, num_lost)


async def check_worker_counters(cluster: Cluster, before: Counts) -> None:
    """The workers have counted as many tokens since as were booked; only where no process has ended.

    What was on its way in a session that was lost, as a slow machine's may be, only the worker knows of.
    """
    found = ""

    def are_equal() -> bool:
        nonlocal found
        now = Counts.read(cluster)
        made, booked = now.made - before.made, now.booked - before.booked
        found = f"workers made {made}, booked {booked}"
        return made == booked or (made > booked and now.num_lost > before.num_lost)

    try:
        await eventually(lambda: asyncio.to_thread(are_equal), "the sums are the same", _SETTLING_S)
    except AssertionError:
        raise AssertionError(found) from None


async def check_logs(cluster: Cluster) -> None:
    """No program has logged an error."""
    lines = [line for server in (*cluster.gateways, *cluster.workers) for line in server.node.last_words()]
    assert not lines, f"{len(lines)} errors logged:\n" + "\n".join(lines[:5])
