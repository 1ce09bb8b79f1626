"""The written key schema of the store: every key, its type, fields, lifetime, owner, and who removes it.

Every key starts with `tidegate:{<pool>}:`. The braces are Redis Cluster's hash tag, so all keys of a pool live in one
slot and one script may touch any of them. A pool is what one queue serves: all gateways and workers of a deployment.

The keys that exist once per pool are passed to every script as KEYS, always all of them, in the order of `pool_keys`.
The keys of a request, gateway, worker or model are built inside the scripts from the pool's prefix (ARGV[1]): which
ones a run touches is known only while it runs, and the shared hash tag puts them on the same node. `common.lua` builds
them with the same names as the functions here; this file is the specification.

All times are integer microseconds of Redis's own clock, all counters stay under 2**53, and epochs and sequence numbers
of workers (64 bits) are kept and compared as decimal strings, because a Lua number cannot hold them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.types import Band
from gateway.queueing.queue import Flow

_POOL_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """The keys of one pool. Raises ValueError for a name that could break the hash tag."""

    pool: str

    def __post_init__(self) -> None:
        if _POOL_PATTERN.fullmatch(self.pool) is None:
            raise ValueError(f"pool {self.pool!r}: allowed are 1 to 64 letters, digits, dots, underscores and dashes")

    @property
    def prefix(self) -> str:
        """What every key of the pool starts with."""
        return f"tidegate:{{{self.pool}}}:"

    def pool_keys(self) -> list[str]:
        """The keys that exist once per pool, in the order in which scripts take them.

        models: SET of models that have waiting requests. Follows `waiting`.
        gateways: ZSET gateway id -> time until which it lives. Set by heartbeat and enqueue. Removed by its own leave,
            or by whoever reaps it once nothing that it owned is left.
        leases: ZSET request id -> time at which an unaccounted claim is undone. Added by dispatch; removed when the
            claim is accounted for, undone or finished.
        sequence: STRING, counter of arrivals; gives the order inside a band. The only key without an end.
        announced: ZSET worker id -> time at which its announcement expires. Set by announce, purged by heartbeat.
        announcements: HASH worker id -> JSON {epoch, address, model, draining}. Follows `announced`.
        """
        names = ("models", "gateways", "leases", "sequence", "announced", "announcements")
        return [self.prefix + name for name in names]

    def request(self, request_id: str) -> str:
        """HASH, one live request. Written by enqueue, removed by finish or by reaping its dead owner.

        owner, model, band, tenant, input_tokens, tokens_needed, cached: as enqueued; the last three are renewed by
        requeue. cached: JSON {worker id: leading blocks believed cached there}, empty for none;
        arrival: its number in the sequence; rank: -1 once it was resumed after a lost worker, 1 once it was handed
        back, else 0; turn: number in the sequence when its present wait began, waiting_since: the time of that;
        attempt: of the last claim, 0 before the first; worker, epoch: of the present claim, empty while it waits;
        overtaken: how often a later request was claimed while this one did not fit; charged, charged_tokens: what its
        input has added to the flow's counter and to the service of bands, 0 before the first claim and after a claim
        that was taken back.
        """
        return f"{self.prefix}request:{request_id}"

    def waiting(self, band: Band, model: str) -> str:
        """ZSET request id -> turn, the waiting requests of a band and model.

        Members are added by enqueue and requeue, removed by dispatch, finish and reaping; Redis removes it when empty.
        """
        return f"{self.prefix}waiting:{int(band)}:{model}"

    def flows(self, band: Band, model: str) -> str:
        """ZSET tenant -> counter, the flows that have waiting requests. Follows `line` and `flow`."""
        return f"{self.prefix}flows:{int(band)}:{model}"

    def line(self, flow: Flow) -> str:
        """ZSET request id -> place (arrival + rank * 2**52), the waiting requests of a flow. Follows `waiting`."""
        return f"{self.prefix}line:{int(flow.band)}:{flow.tenant}:{flow.model}"

    def flow(self, flow: Flow) -> str:
        """HASH, what a flow has been served: counter, in hundredths of weighted tokens at weight 1; the weight.

        Written by enqueue, dispatch, charge and requeue. Without an end while the flow has waiting requests; else it
        expires ten minutes after its last change.
        """
        return f"{self.prefix}flow:{int(flow.band)}:{flow.tenant}:{flow.model}"

    def service(self, model: str) -> str:
        """HASH, what the bands of a model have been served, most fields once for each band.

        virtual: the greatest counter at which a flow was chosen; running: claimed requests; all, own: weighted tokens
        served to every band, and thousandths of those served to this one, while it waited behind a waiting higher one,
        less what dispatch has settled; since_longest: claims since the last one that went to the longest wait.
        Written by dispatch, charge, requeue, finish and reaping; expires ten minutes after its last change.
        """
        return f"{self.prefix}service:{model}"

    def owned(self, gateway_id: str) -> str:
        """SET of the ids of a gateway's live requests: makes reaping a dead gateway cheap. Follows `request`."""
        return f"{self.prefix}owned:{gateway_id}"

    def reached(self, gateway_id: str) -> str:
        """SET of the workers that a gateway can submit to, and the empty name, so that there is a set even for none.

        Written by reach; expires some time after it, removed by leave and by whoever reaps the gateway.
        """
        return f"{self.prefix}reached:{gateway_id}"

    def inbox(self, gateway_id: str) -> str:
        """STREAM of what others ask of it: kind ("claim" or "cancel"), request_id, a claim's worker, epoch, attempt.

        Trimmed by its reader, expires with the gateway's heartbeat, removed by leave and by whoever reaps the gateway.
        """
        return f"{self.prefix}inbox:{gateway_id}"

    def worker(self, worker_id: str) -> str:
        """HASH, a worker's newest numbers: epoch, seq, model, block_size, num_blocks, max_num_seqs, free_slots,
        free_blocks, reported_at. Written by dispatch, zeroed by forget_worker, expires an hour after its last report.
        """
        return f"{self.prefix}worker:{worker_id}"

    def serving(self, model: str) -> str:
        """SET of ids of workers that reported to serve a model. Added to by dispatch, which also drops those whose
        numbers have expired or name another model; expires an hour after the last report of any of them.
        """
        return f"{self.prefix}serving:{model}"

    def claims(self, worker_id: str) -> str:
        """HASH request id -> "epoch:attempt:blocks", claims that are not yet contained in the worker's numbers.

        Added by dispatch; removed when accounted for, undone or finished. Those of an older epoch do not count.
        """
        return f"{self.prefix}claims:{worker_id}"

    # Tenants

    @property
    def tenants(self) -> str:
        """HASH tenant id -> JSON {id, band, weight, limits, key_sha256} or {deleted}, what operators have set.

        Changed by tenants_write, filled by tenants_restore after a loss; without an end.
        """
        return self.prefix + "tenants"

    @property
    def tenants_version(self) -> str:
        """STRING, counter of changes of `tenants`. Without an end."""
        return self.prefix + "tenants_version"

    # Endings

    @property
    def endings(self) -> str:
        """HASH request id -> JSON [gateway, status, reason, message, retry_after_s, age_s], the latest requests of the
        fleet that ended with an error. Written by ending_note, which also removes the oldest; expires after a day.
        """
        return self.prefix + "endings"

    @property
    def ending_times(self) -> str:
        """ZSET request id -> time at which it was noted. Follows `endings`."""
        return self.prefix + "ending_times"

    # Limits

    @property
    def limits(self) -> str:
        """HASH, generation: names the content of the store, renewed_at: when a gateway has renewed its leases last,
        settled_at: until then no limit grants anything, as gateways may still have to tell of use. Written by renew,
        expires ten minutes after it."""
        return self.prefix + "limits"

    @property
    def recalled(self) -> str:
        """ZSET tenant -> time until which gateways are to give back their shares of its limits. Added to by reserve,
        expires after some seconds."""
        return self.prefix + "recalled"

    def window(self, tenant: str) -> str:
        """HASH, what a tenant has used lately: r<slot> requests and t<slot> tokens, slots of a second of the clock;
        r, t: their sums; from: no slot before it is there; tat: time at which the tenant's allowance for requests at
        once is full again.

        Written by reserve, settle and share; expires when the last slot has left the window.
        """
        return f"{self.prefix}window:{tenant}"

    def day(self, tenant: str) -> str:
        """HASH, day: number of a calendar day of the tenant, tokens: used in it. Written by reserve, settle and share,
        expires two days after the last use."""
        return f"{self.prefix}day:{tenant}"

    def running(self, tenant: str) -> str:
        """ZSET request id -> time at which its concurrency slot comes back by itself.

        Added to by reserve and share, extended by renew, removed by settle; expires with the last lease.
        """
        return f"{self.prefix}running:{tenant}"

    def reservation(self, request_id: str) -> str:
        """HASH, owner: the gateway that settles it, tokens: reserved, slot, day: where they are counted.

        Written by reserve and share, removed by settle or, once its owner is dead, ledger_reap; expires ten minutes
        after its last renewal.
        """
        return f"{self.prefix}reservation:{request_id}"

    def shares(self, tenant: str) -> str:
        """HASH gateway id -> what is set aside of the tenant's limits for it to use while it cannot reach the store.

        Eight numbers: time until which it uses them; number of the latest call about it, and of the latest whose uses
        were charged; requests, tokens, concurrent requests, tokens of a day; the last day that these may be of.
        Written by share and reserve, removed by leave_shares, or by share once they count no more; expires after two
        days.
        """
        return f"{self.prefix}shares:{tenant}"

    # The ledger

    @property
    def ledger(self) -> str:
        """STREAM, one entry for each request that was accepted and has ended: the fields of `UsageRecord`.

        Added to by ledger_close and ledger_reap, which also cut it to its length; ledger_close replaces what
        ledger_reap has written of a gateway that lives after all; without an end.
        """
        return self.prefix + "ledger"

    @property
    def ledger_owners(self) -> str:
        """SET of gateways that may have open records. Added to by ledger_open; removed by ledger_leave, ledger_reap."""
        return self.prefix + "ledger_owners"

    def open_records(self, gateway_id: str) -> str:
        """HASH record id -> JSON list of a record's values but outcome and reason, of its live requests.

        Written by ledger_open and ledger_note, removed field by field by ledger_close or, once it is dead, ledger_reap.
        """
        return f"{self.prefix}ledger_open:{gateway_id}"

    def reaped_records(self, gateway_id: str) -> str:
        """HASH record id -> its entry in the stream, of records that others have closed.

        Written by ledger_reap, removed field by field by ledger_close, expires an hour after the last.
        """
        return f"{self.prefix}ledger_reaped:{gateway_id}"

    # The journal of resumable streams

    def journal(self, request_id: str) -> str:
        """HASH, request: JSON of what was asked, prompt included; digest: of the call; writer: number of the run that
        may append; written: passages that it has appended. Written by journal_create, journal_adopt and journal_append,
        removed by journal_forget, expires some minutes after its last change.
        """
        return f"{self.prefix}journal:{request_id}"

    def passages(self, request_id: str) -> str:
        """STREAM of passages: JSON {t: token ids, l: log probabilities, f: finish reason}. Added to by journal_append,
        expires with the journal."""
        return f"{self.prefix}passages:{request_id}"

    # Jobs

    @property
    def jobs_due(self) -> str:
        """ZSET "tenant/job id" -> time from which it may be run, or at which the lease of its run passes.

        Added to by job_submit, changed by job_claim, job_renew and job_release, removed by job_finish and job_cancel.
        """
        return self.prefix + "jobs_due"

    def job(self, tenant: str, job_id: str) -> str:
        """HASH, state, request, digest, output_tokens, created_at, ended_at, runs: how many, the present one's number;
        result, reason, message at its end. Written by the scripts of jobs; the request goes at its end, the rest
        expires some time after it.
        """
        return f"{self.prefix}job:{tenant}/{job_id}"

    def jobs(self, tenant: str) -> str:
        """ZSET job id -> creation time. Added to by job_submit; job_list and job_submit remove what is forgotten."""
        return f"{self.prefix}jobs:{tenant}"
