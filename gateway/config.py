"""What a gateway can be told; every field has a unit and a consequence."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from common.config import Settings

_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}")


class GatewaySettings(Settings):
    """Settings of the gateway: `TIDEGATE_GATEWAY_<NAME>`, or the flag of the same name."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_GATEWAY_", populate_by_name=True)

    listen: str = Field("127.0.0.1:50051", description="host:port of the gRPC server; port 0 picks a free one")
    metrics_listen: str = Field(
        "127.0.0.1:9464",
        description="host:port of Prometheus metrics; empty turns it off; several processes take the next ones too",
    )
    processes: int = Field(
        1, ge=1, le=64, description="gateways that share the port, each with an id of its own; more use more cores"
    )
    redis_url: str = Field(
        "",
        description="redis://host:port/db or unix:///path of the queue's store; empty starts a private redis-server",
        validation_alias="TIDEGATE_REDIS_URL",
    )
    store_timeout_s: float = Field(
        2.0, gt=0, description="seconds that the store may take for an answer; without one it counts as lost"
    )
    store_patience_s: float = Field(
        0.03,
        gt=0,
        description="seconds of the store's silence after which a new request is decided without it, by the gateway's "
        "share of the tenant's limits; resumable ones and jobs are refused",
    )
    store_wait_s: float = Field(
        30.0, gt=0, description="seconds a request waits while the store is lost, then STORE_UNAVAILABLE"
    )
    outage_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="part of what is unused of each limit that all gateways together may admit while the store is lost",
    )
    outage_s: float = Field(
        300.0, gt=0, description="seconds that a gateway may admit requests of limited tenants without the store"
    )
    pool: str = Field("default", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$", description="fleet whose queue is served")
    gateway_id: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
        description="name in the fleet, to which every start adds its own; empty: chosen",
    )
    tenants_file: Path = Field(
        Path("tenants.json"),
        description="JSON file of tenants: id, key_sha256, band, weight, limits; read at the start and when it changes",
    )
    admin_key: str = Field(
        "", description="secret that operators show to the admin service; empty: it refuses everybody"
    )
    workers: str = Field("", description="comma-separated host:port of workers to dial besides the announced ones")
    default_model: str = Field("", description="answers requests that name no model; empty: the only model there is")

    queue_ttl_s: float = Field(
        120.0, gt=0, description="seconds a request may wait before it is refused with QUEUE_TTL"
    )
    no_worker_timeout_s: float = Field(
        15.0, ge=0, description="seconds a request waits while no worker serves its model, then NO_WORKERS"
    )
    max_queue_length: int = Field(
        10_000, ge=1, description="waiting requests of one band; more are refused: QUEUE_FULL"
    )
    normal_share: float = Field(
        0.1, ge=0, le=0.5, description="least share of served tokens of the normal band while a higher one waits too"
    )
    low_share: float = Field(0.05, ge=0, le=0.4, description="the same for the low band")
    normal_headroom: float = Field(
        0.0, ge=0, lt=1, description="part of each worker that the normal band leaves free for the high one"
    )
    low_headroom: float = Field(
        0.2, ge=0, lt=1, description="part of each worker that the low band leaves free for higher ones"
    )
    long_wait_s: float = Field(
        60.0, ge=0, description="seconds after which a request's turn may come by its wait alone, one claim in 32"
    )
    prefix_weight: float = Field(
        0.25,
        ge=0,
        le=1,
        description="load, as part of a worker's slots and blocks, that having all of a prompt cached makes up for; "
        "more finds more cached, and loads workers less evenly",
    )
    max_attempts: int = Field(3, ge=1, description="workers that a request may lose before it fails with WORKER_LOST")
    credit_output_tokens: int = Field(
        64, ge=1, description="output tokens for which blocks are reserved at dispatch, besides the prompt's"
    )
    jobs_at_once: int = Field(
        8, ge=0, description="jobs that this gateway works on at a time; 0: it leaves them to others"
    )
    job_ttl_s: float = Field(86_400.0, gt=0, description="seconds a job's result is kept after its end")
    max_jobs_per_tenant: int = Field(10_000, ge=1, description="jobs that are kept for a tenant, ended ones included")
    journal_ttl_s: float = Field(
        600.0, gt=0, description="seconds a resumable answer is kept in the store after its last change"
    )
    ledger_max_records: int = Field(
        100_000, ge=1, description="ended requests whose usage is kept in the store; the oldest go first"
    )
    max_unread_tokens: int = Field(
        256, ge=1, description="tokens that a client may leave unread until the worker pauses its request"
    )
    slow_consumer_s: float = Field(
        60.0, gt=0, description="seconds a client may leave its stream unread, then SLOW_CONSUMER"
    )

    worker_silence_s: float = Field(
        2.5, gt=0, description="seconds without an event (heartbeats come every 0.5 s), then the worker is lost"
    )
    max_loop_age_s: float = Field(
        30.0, gt=0, description="seconds a worker's engine loop may be without progress, then the worker is lost"
    )
    connect_timeout_s: float = Field(10.0, gt=0, description="seconds to connect to a worker and get its description")
    announce_ttl_s: float = Field(10.0, gt=0, description="seconds an announcement of a worker is valid")
    worker_poll_s: float = Field(0.5, gt=0, description="seconds between looks at the announced workers")
    heartbeat_s: float = Field(1.0, gt=0, le=3.0, description="seconds between signs of life in the store")
    heartbeat_ttl_s: float = Field(6.0, gt=0, description="seconds without one until others take this gateway for dead")

    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenize long prompts")
    min_ping_interval_s: float = Field(5.0, gt=0, description="clients may send keepalive pings this often")
    max_connection_age_s: float | None = Field(
        None,
        gt=0,
        description="seconds until clients are asked to reconnect, so that new gateways get load; unset: never",
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: str) -> str:
        for address in filter(None, (part.strip() for part in value.split(","))):
            if not _ADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is not host:port")
        return value

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """`workers`, split."""
        return tuple(filter(None, (part.strip() for part in self.workers.split(","))))
