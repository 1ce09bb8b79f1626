"""What has to be so after any harm, read from the clients' records, from Redis and from the programs themselves."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import redis

from common.types import FinishReason, JobState
from gateway.store.keys import PoolKeys
from tests.chaos.cluster import MAX_CONCURRENT, POOL, REQUESTS_PER_MINUTE, Cluster
from tests.chaos.node import eventually
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
_ON_THE_WAY_S = 1.0  # that a gateway waits at a request's end, besides the time for which programs are busy
_SETTLING_S = 60.0


async def check_all(cluster: Cluster, traffic: Traffic, *, forgotten: Sequence[Call] = ()) -> None:
    """Every invariant, of every call of the traffic.

    `forgotten`: calls whose records may be lost, with the store, or with a gateway that could not reach it.
    """
    faults = []
    try:
        await check_nothing_left(cluster)
    except AssertionError as error:
        faults.append(str(error))
    for check in (
        lambda: check_answers(traffic.calls),
        lambda: check_quota(traffic.calls, traffic.lag_s),
        lambda: check_ledger(cluster, [call for call in traffic.calls if call not in forgotten]),
        lambda: check_logs(cluster),
    ):
        try:
            check()
        except AssertionError as error:
            faults.append(str(error))
    assert not faults, "\n".join(faults)


def check_answers(calls: Sequence[Call]) -> None:
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


def check_quota(calls: Sequence[Call], lag_s: float) -> None:
    """The limited tenant never had more requests at once, or in a minute, than it may.

    A request counts as running only while that is certain, however late its client has read: from its acceptance until
    it had lasted as long as its gateway says, less what that waits for the store at the end.
    """
    slack_s = _ON_THE_WAY_S + 2 * lag_s
    limited = [call for call in calls if call.tenant == "limited" and call.num_streams == 1]
    running = []
    for call in limited:
        until = call.sent_at + call.finished[-1].timing.total_s - slack_s if call.finished else 0.0
        if call.accepted_at is not None and until > call.accepted_at:
            running.append((call.accepted_at, until, call.kind, call.request_id))
    for at, *_ in running:
        together = [each for each in running if each[0] <= at < each[1]]
        assert len(together) <= MAX_CONCURRENT, f"at once, late by {lag_s:.2f} s: {together}"
    spans = [(call.sent_at, call.accepted_at) for call in limited if call.accepted_at is not None]
    in_a_minute = [sum(1 for sent, accepted in spans if start <= sent and accepted < start + 60) for start, _ in spans]
    assert max(in_a_minute, default=0) <= REQUESTS_PER_MINUTE, f"{max(in_a_minute)} requests in a minute"


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


def check_ledger(cluster: Cluster, calls: Sequence[Call]) -> None:
    """One record for each accepted request and run: what was delivered is what clients got, nothing counts twice."""
    by_request: dict[str, list[Record]] = defaultdict(list)
    with cluster.store() as client:
        for _, record in client.xrange(PoolKeys(POOL).ledger):
            by_request[record["request_id"]].append(record)
    faults = []
    for call in calls:
        if call.num_streams:
            records = by_request[f"{call.tenant}/{call.request_id}"]
            faults += [f"{call.kind} {call.request_id}: {fault}" for fault in _ledger_faults(call, records)]
    assert not faults, f"{len(faults)} of {len(calls)} calls:\n" + "\n".join(faults[:20])


def _ledger_faults(call: Call, records: Sequence[Record]) -> list[str]:
    total = {
        name: sum(int(record[name]) for record in records)
        for name in ("prompt_tokens", "generated_tokens", "delivered_tokens")
    }
    has_one_run = call.kind not in ("resumable", "keyed")
    if not records or (has_one_run and len(records) != 1):
        return [f"{len(records)} records"]
    faults = []
    if len({record["record_id"] for record in records}) != len(records):
        faults.append("a record twice")
    most = len(call.question.token_ids)
    if total["delivered_tokens"] > total["generated_tokens"]:
        faults.append(f"more delivered than generated: {total}")
    if has_one_run and is_whole(call):
        usage = call.finished[-1].usage
        if total["delivered_tokens"] != usage.completion_tokens or total["prompt_tokens"] != usage.prompt_tokens:
            faults.append(f"{total} recorded, {usage} told")
        if records[0]["outcome"] != "completed":
            faults.append(f"outcome {records[0]['outcome']}")
    if has_one_run and call.question.reason is FinishReason.LENGTH and total["generated_tokens"] > most:
        faults.append(f"{total['generated_tokens']} tokens generated, {most} asked for")
    return faults


def check_worker_counters(cluster: Cluster, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Tokens that the workers have counted, and that the ledger and the gateways' late ones have, since `before`.

    Raises AssertionError unless these are the same: only where no process has ended since.
    """
    made = sum(int(worker.metric("tidegate_worker_output_tokens_total")) for worker in cluster.workers)
    late = sum(int(gateway.metric("tidegate_gateway_late_tokens_total")) for gateway in cluster.gateways)
    with cluster.store() as client:
        booked = sum(int(record["generated_tokens"]) for _, record in client.xrange(PoolKeys(POOL).ledger))
    now = made, booked + late
    if before != (0, 0):
        assert now[0] - before[0] == now[1] - before[1], (
            f"workers made {now[0] - before[0]}, booked {now[1] - before[1]}"
        )
    return now


def check_logs(cluster: Cluster) -> None:
    """No program has logged an error."""
    lines = [line for server in (*cluster.gateways, *cluster.workers) for line in server.node.last_words()]
    assert not lines, f"{len(lines)} errors logged:\n" + "\n".join(lines[:5])
