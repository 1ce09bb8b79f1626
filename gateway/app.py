"""The gateway put together: the only place that builds concrete classes."""

from __future__ import annotations

import asyncio
import os
import socket
from random import Random, SystemRandom
from types import TracebackType

import structlog
from prometheus_client import CollectorRegistry

from common.clock import Clock, SystemClock
from common.errors import UnavailableError
from common.metrics import GatewayMetrics, MetricsServer
from common.rpc.fleet_key import admin_authenticator, fleet_authenticator
from common.rpc.server import RpcServer, ServerOptions
from common.rpc.tls import fleet_dialling, server_credentials
from gateway.admission.drain_rate import DrainRate
from gateway.background import Background
from gateway.bookkeeper import Bookkeeper
from gateway.config import GatewaySettings
from gateway.dispatcher import Dispatcher, DispatcherSettings
from gateway.handler import Handler, HandlerSettings
from gateway.housekeeper import Housekeeper, HousekeeperSettings
from gateway.job_runner import JobRunner
from gateway.placement.fleet import Fleet
from gateway.prompts import PromptReader
from gateway.resumption import Resumption
from gateway.rpc import admin_service, fleet_service, inference_service, jobs_service
from gateway.rpc.admin_service import AdminService
from gateway.rpc.dialer import WorkerDialer
from gateway.rpc.endings import Endings
from gateway.rpc.explanation import Explainer
from gateway.rpc.shared_endings import SharedEndings
from gateway.rpc.worker_session import SessionSettings
from gateway.store.connection import Trunk
from gateway.store.redis_endings import RedisEndingStore
from gateway.store.redis_jobs import RedisJobStore
from gateway.store.redis_journal import RedisJournal
from gateway.store.redis_ledger import RedisLedger
from gateway.store.redis_limiter import LimiterSettings, RedisLimiter
from gateway.store.redis_queue import QueueSettings, RedisQueue
from gateway.store.redis_tenants import RedisTenantStore
from gateway.store_calls import StoreCalls
from gateway.store_health import StoreHealth
from gateway.tenant_edits import TenantEdits
from gateway.tenants import Tenants

_log = structlog.get_logger(__name__)
_NUM_LISTENERS = 16  # so that few connections share one, and their new calls seldom wait for one another
_LAST_STEPS_S = 5.0  # for what ended requests still have to write


class GatewayApp:
    """One gateway in the running event loop: `start`, then `stop`, once each; or an async context manager."""

    def __init__(
        self,
        settings: GatewaySettings,
        tenants: Tenants,
        redis_url: str,
        *,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        clock = clock or SystemClock()
        random = random or SystemRandom()
        self._settings = settings
        # Every start is a gateway of its own: what an earlier one of that name has left is then reaped as a dead one's.
        name = settings.gateway_id or f"{socket.gethostname()[:40]}-{os.getpid()}"
        self.gateway_id = f"{name}-{random.randbytes(4).hex()}"
        self._registry = CollectorRegistry()
        self._metrics_server: MetricsServer | None = None
        metrics = GatewayMetrics(self._registry)
        self._changed = asyncio.Event()
        self.drain_wanted = asyncio.Event()
        """Set when an operator has asked for it: whoever runs this gateway then stops it."""
        self._background = Background(self._on_crash)
        self._store = StoreHealth(metrics, self._changed.set)
        self.fleet = Fleet(clock.monotonic, settings.default_model, self._changed.set)
        trunk = Trunk(redis_url, timeout_s=settings.store_timeout_s)
        self.queue = RedisQueue(
            trunk, pool=settings.pool, gateway_id=self.gateway_id, settings=_queue_settings(settings)
        )
        self.limiter = RedisLimiter(
            trunk,
            pool=settings.pool,
            gateway_id=self.gateway_id,
            clock=clock,
            uniform=random.uniform,
            settings=LimiterSettings(
                outage_share=settings.outage_share, outage_s=settings.outage_s, timeout_s=settings.store_timeout_s
            ),
            on_share_used=metrics.admitted_without_store.inc,
        )
        drain_rate = DrainRate(random.uniform)
        self.dispatcher = Dispatcher(
            self.queue,
            self.fleet,
            self._background,
            self._store,
            metrics,
            clock,
            drain_rate,
            DispatcherSettings(
                self.gateway_id,
                settings.max_attempts,
                settings.credit_output_tokens,
                settings.heartbeat_ttl_s,
                settings.max_unread_tokens,
            ),
        )
        self._housekeeper = Housekeeper(
            self.dispatcher,
            self.queue,
            self.limiter,
            self.fleet,
            self._store,
            metrics,
            clock,
            drain_rate,
            _housekeeper_settings(settings),
        )
        self._books = Bookkeeper(
            RedisLedger(
                trunk,
                pool=settings.pool,
                gateway_id=self.gateway_id,
                max_records=settings.ledger_max_records,
                timeout_s=settings.store_timeout_s,
            ),
            self.dispatcher,
            self._store,
            clock,
            period_s=settings.heartbeat_s,
            choose_id=lambda: random.randbytes(12).hex(),
        )
        calls = StoreCalls(self._store, self._background, trunk.is_answered, patience_s=settings.store_patience_s)
        self._resumption = Resumption(
            RedisJournal(trunk, pool=settings.pool, ttl_s=settings.journal_ttl_s, timeout_s=settings.store_timeout_s),
            calls,
            self.dispatcher,
            self.fleet,
            self._store,
        )
        self._prompts = PromptReader(settings.tokenizer_threads)
        self._handler = Handler(
            self.queue,
            self.limiter,
            self.fleet,
            self.dispatcher,
            self._prompts,
            self._background,
            self._store,
            metrics,
            clock,
            drain_rate,
            self._books,
            self._resumption,
            HandlerSettings(
                self.gateway_id,
                settings.max_queue_length,
                takeover_s=2 * settings.heartbeat_ttl_s,  # a dead one is reaped by then, however late others look
                store_patience_s=settings.store_patience_s,
            ),
            choose_id=lambda: random.randbytes(12).hex(),
            choose_seed=lambda: random.getrandbits(64),
            is_answered=trunk.is_answered,
        )
        self._dialer = WorkerDialer(
            settings.worker_addresses,
            self.queue,
            self.dispatcher,
            self._background,
            self._store,
            clock,
            _session_settings(settings, self.gateway_id),
            poll_s=settings.worker_poll_s,
            dialling=fleet_dialling(settings),
            channel_options=[
                ("grpc.max_receive_message_length", settings.max_receive_message_bytes),
                ("grpc.max_send_message_length", settings.max_send_message_bytes),
            ],
            random=random,
        )
        jobs = RedisJobStore(
            trunk,
            pool=settings.pool,
            ttl_s=settings.job_ttl_s,
            max_jobs=settings.max_jobs_per_tenant,
            timeout_s=settings.store_timeout_s,
        )
        self._job_runner = JobRunner(
            jobs,
            self._handler,
            tenants,
            self._store,
            jobs_service.JOB_CODEC,
            num_at_once=settings.jobs_at_once,
            lease_s=settings.heartbeat_ttl_s,
        )
        self._credentials = server_credentials(settings)
        self._server = RpcServer(
            _server_options(settings),
            clock,
            {
                inference_service.SERVICE_NAME: tenants.authenticate,
                jobs_service.SERVICE_NAME: tenants.authenticate,
                fleet_service.SERVICE_NAME: fleet_authenticator(settings.fleet_key),
                admin_service.SERVICE_NAME: admin_authenticator(settings.admin_key),
            },
        )
        endings = Endings(clock)
        self._shared_endings = SharedEndings(
            RedisEndingStore(trunk, pool=settings.pool, timeout_s=settings.store_timeout_s),
            endings,
            self._store,
            clock,
            gateway_id=self.gateway_id,
        )
        inference = inference_service.InferenceService(
            self._handler,
            self.dispatcher,
            self.fleet,
            self._prompts,
            endings,
            clock,
            slow_consumer_s=settings.slow_consumer_s,
        )
        announcements = fleet_service.FleetService(self.queue, ttl_s=settings.announce_ttl_s)
        self._server.add(inference_service.SERVICE_NAME, inference_service.register, inference)
        job_desk = jobs_service.JobsService(
            jobs, calls, self._handler, self._store, choose_id=lambda: random.randbytes(12).hex()
        )
        self._server.add(jobs_service.SERVICE_NAME, jobs_service.register, job_desk)
        self._server.add(fleet_service.SERVICE_NAME, fleet_service.register, announcements)
        self._edits = TenantEdits(
            RedisTenantStore(trunk, pool=settings.pool, timeout_s=settings.store_timeout_s), tenants, self._store
        )
        administration = AdminService(
            self.dispatcher,
            self._dialer,
            self.queue,
            self.limiter,
            tenants,
            self._edits,
            Explainer(self.dispatcher, self._dialer, self.queue, endings, self._shared_endings, clock, self.gateway_id),
            self.gateway_id,
            begin_drain=self.drain_wanted.set,
        )
        self._server.add(admin_service.SERVICE_NAME, admin_service.register, administration)
        self.port = 0

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics endpoint; None if it is off."""
        return self._metrics_server.port if self._metrics_server is not None else None

    async def start(self) -> None:
        """Listens and starts the loops; SERVING follows when the store answers and a worker is ready."""
        settings = self._settings
        if settings.metrics_listen:
            self._metrics_server = MetricsServer(settings.metrics_listen, self._registry)
        self.port = await self._server.start(settings.listen, self._credentials)
        self._background.run(self._health_loop, "health")
        self.dispatcher.start()
        self._housekeeper.start(self._background)
        self._books.start(self._background)
        self._resumption.start(self._background)
        self._job_runner.start(self._background)
        self._background.run(self._edits.run, "tenant_edits")
        self._background.run(self._shared_endings.run, "endings")
        self._dialer.start()
        _log.info("gateway_started", gateway_id=self.gateway_id, port=self.port, metrics_port=self.metrics_port)

    async def stop(self, drain_s: float | None = None) -> None:
        """Turns NOT_SERVING and refuses new requests, gives live ones `drain_s` seconds, leaves nothing behind."""
        await self._server.enter_drain()
        await self._job_runner.stop()
        await self._handler.drain(self._settings.drain_s if drain_s is None else drain_s)
        await self._server.stop(_LAST_STEPS_S if self.dispatcher.live else 1.0)
        await self._background.finish_steps(_LAST_STEPS_S)
        await self._background.close()
        self._prompts.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        await self.limiter.close()
        await self._edits.close()
        await self._shared_endings.close()
        await self._job_runner.close()
        await self._resumption.stop()
        await self._books.stop(patience_s=_LAST_STEPS_S)
        try:
            await self.queue.close()
        except UnavailableError as error:  # others reap what is left there
            self._store.failed(error)
        _log.info("gateway_stopped", gateway_id=self.gateway_id)

    def end_drain(self) -> None:
        """Ends what a running `stop` still waits for."""
        self._handler.end_all()

    async def __aenter__(self) -> GatewayApp:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    def _on_crash(self) -> None:
        self._handler.fail()
        self._changed.set()

    async def _health_loop(self) -> None:
        """SERVING while the store answers, a worker is ready and every loop runs; Fleet needs no ready worker."""
        while True:
            is_well = self._store.is_up and not self._background.is_crashed
            await self._server.set_serving([admin_service.SERVICE_NAME], is_serving=True)
            await self._server.set_serving([fleet_service.SERVICE_NAME], is_serving=is_well)
            is_serving = is_well and self.fleet.is_ready
            names = ["", inference_service.SERVICE_NAME, jobs_service.SERVICE_NAME]
            await self._server.set_serving(names, is_serving=is_serving)
            await self._changed.wait()
            self._changed.clear()


def _server_options(settings: GatewaySettings) -> ServerOptions:
    return ServerOptions(
        max_receive_message_bytes=settings.max_receive_message_bytes,
        max_send_message_bytes=settings.max_send_message_bytes,
        min_ping_interval_s=settings.min_ping_interval_s,
        max_connection_age_s=settings.max_connection_age_s,
        reuse_port=settings.processes > 1,
        num_listeners=_NUM_LISTENERS,
    )


def _queue_settings(settings: GatewaySettings) -> QueueSettings:
    return QueueSettings(
        normal_share=settings.normal_share,
        low_share=settings.low_share,
        normal_headroom=settings.normal_headroom,
        low_headroom=settings.low_headroom,
        long_wait_s=settings.long_wait_s,
        prefix_weight=settings.prefix_weight,
        timeout_s=settings.store_timeout_s,
    )


def _housekeeper_settings(settings: GatewaySettings) -> HousekeeperSettings:
    return HousekeeperSettings(
        queue_ttl_s=settings.queue_ttl_s,
        no_worker_timeout_s=settings.no_worker_timeout_s,
        heartbeat_s=settings.heartbeat_s,
        heartbeat_ttl_s=settings.heartbeat_ttl_s,
        store_wait_s=settings.store_wait_s,
    )


def _session_settings(settings: GatewaySettings, gateway_id: str) -> SessionSettings:
    return SessionSettings(
        gateway_id=gateway_id,
        fleet_key=settings.fleet_key,
        silence_s=settings.worker_silence_s,
        max_loop_age_s=settings.max_loop_age_s,
        connect_timeout_s=settings.connect_timeout_s,
    )
