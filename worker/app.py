"""Builds a worker and runs it: load, announce, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from common.clock import Clock, SystemClock
from common.default_model import DEFAULT_MODEL, ensure_default_model
from common.metrics import MetricsServer, WorkerMetrics
from common.rpc.server import RpcServer, ServerOptions
from common.rpc.tls import fleet_dialling, server_credentials
from common.types import ModelDescription, ModelLimits
from common.window import Window, Windows
from worker.cache.block import keyed_digest
from worker.cache.host import HostTier
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.cache.storage import KVLayout
from worker.cache.swap import make_copier
from worker.config import WorkerSettings
from worker.engine.config import SchedulerConfig
from worker.engine.engine import Engine
from worker.engine.events import StepOutput
from worker.engine.loop import EngineLoop
from worker.engine.modes import MODES
from worker.engine.scheduler import Scheduler
from worker.engine.trace import ChromeTrace, Tracer
from worker.kernels import load_backend
from worker.model.dtype import choose_dtype
from worker.model.loaded_model import LoadedModel
from worker.model.runner import ModelRunner
from worker.model.sampler import Sampler
from worker.model.sanity import perplexity
from worker.model.weights import load_model
from worker.rpc.announcer import Announcer
from worker.rpc.fleet_key import FleetKey
from worker.rpc.identity import Identity
from worker.rpc.service import SERVICE_NAME, Serving, WorkerService, register
from worker.rpc.watchdog import watch_loop
from worker.telemetry import observe_step

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")

HEALTH_NAMES = ("", SERVICE_NAME)
MIN_CHECK_TOKENS = 128  # a smaller pool may not hold the text that a model is checked with
GOODBYE_GRACE_S = 1.0  # for calls that are not ours to finish: health watchers, reflection


class Worker:
    """One worker process: its server, its engine, and the order in which they come and go."""

    def __init__(self, settings: WorkerSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._registry = CollectorRegistry()
        self._metrics = WorkerMetrics(self._registry)
        self._metrics.set_bounds(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            step_budget_s=settings.step_budget_ms / 1000,
            first_chunk_s=settings.first_chunk_ms / 1000,
        )
        # Milliseconds since 1970: later starts have larger epochs, and every script's numbers hold them exactly.
        self._identity = Identity(settings.worker_id, int(self._clock.time() * 1000))
        fleet_key = FleetKey(settings.fleet_key)
        self._drain_wanted = asyncio.Event()  # by an operator, through a gateway
        self._service = WorkerService(self._identity, fleet_key, self._metrics.sessions.set, self._drain_wanted.set)
        options = ServerOptions(settings.max_receive_message_bytes, settings.max_send_message_bytes)
        self._credentials = server_credentials(settings)
        self._dialling = fleet_dialling(settings)
        self._server = RpcServer(options, self._clock, {SERVICE_NAME: fleet_key.authenticate})
        self._server.add(SERVICE_NAME, register, self._service)
        self._background: set[asyncio.Task[Any]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then drains. Raises OSError or RuntimeError if a port is taken, ModelLoadError
        and ValueError if the model cannot be served with these settings."""
        structlog.contextvars.bind_contextvars(worker_id=self._identity.worker_id)
        with contextlib.ExitStack() as stack:
            if self._settings.metrics_listen:
                metrics = stack.enter_context(MetricsServer(self._settings.metrics_listen, self._registry))
                _log.info("metrics_listening", port=metrics.port)
            port = await self._server.start(self._settings.listen, self._credentials)
            _log.info("worker_listening", listen=self._settings.listen, port=port, epoch=self._identity.epoch)
            try:
                tracer = stack.enter_context(_open_trace(self._settings.trace))
                loaded = await _unless(
                    stop, asyncio.to_thread(load_engine, self._settings, self._clock, tracer, stack.callback)
                )
                if loaded is not None:
                    await self._serve(*loaded, port, stop)
            finally:
                for task in self._background:
                    task.cancel()
                await asyncio.gather(*self._background, return_exceptions=True)
                await self._server.stop(GOODBYE_GRACE_S)
        _log.info("worker_stopped")

    async def _serve(self, engine: Engine, description: ModelDescription, port: int, stop: asyncio.Event) -> None:
        loop = EngineLoop(engine, self._clock, on_output=self._on_output, on_dead=self._on_dead)
        loop.start()
        try:
            self._service.serve(Serving(loop, description))
            await self._set_serving(True)
            announcer = self._announcer(description.limits.model, port)
            announcing = self._spawn(announcer.run())
            self._spawn(watch_loop(loop, self._settings.max_loop_age_s, self._set_serving))
            _log.info("worker_serving", **dataclasses.asdict(description.limits))
            await _any_set(stop, self._drain_wanted)
            announcing.cancel()
            await self._drain(loop, announcer)
        finally:
            await loop.stop()

    async def _drain(self, loop: EngineLoop, announcer: Announcer) -> None:
        """Lets accepted requests finish within drain_s; what is left then is handed back to its gateways."""
        _log.info("worker_draining", drain_s=self._settings.drain_s)
        await self._server.enter_drain()
        self._spawn(announcer.say_draining())
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await asyncio.gather(loop.drain(), self._service.drain())
        except TimeoutError:
            _log.warning("drain_timed_out", drain_s=self._settings.drain_s)
            with contextlib.suppress(TimeoutError):  # of a gateway that does not read: to it this worker is lost
                async with asyncio.timeout(GOODBYE_GRACE_S):
                    await self._service.hand_back()

    def _on_output(self, output: StepOutput, duration_s: float) -> None:
        self._service.on_step(output)
        observe_step(self._metrics, output, duration_s)

    def _on_dead(self, error: BaseException) -> None:
        """Nothing can be computed any more: says so to whoever asks, and stays up to be asked."""
        _log.critical("engine_died", exc_info=error)
        for task in self._background:
            task.cancel()  # stops announcing, and the watchdog
        self._service.fail()
        self._spawn(self._set_serving(False))

    async def _set_serving(self, is_serving: bool) -> None:
        await self._server.set_serving(HEALTH_NAMES, is_serving=is_serving)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _announcer(self, model: str, port: int) -> Announcer:
        settings = self._settings
        host = settings.listen.rpartition(":")[0]
        is_any = host.strip("[]") in ("", "0.0.0.0", "::")
        return Announcer(
            settings.gateway_addresses,
            self._identity,
            address=settings.advertise or f"{'' if is_any else host}:{port}",
            model=model,
            fleet_key=settings.fleet_key,
            dialling=self._dialling,
            random=random.Random(),
        )


def load_engine(
    settings: WorkerSettings,
    clock: Clock | None = None,
    tracer: Tracer | None = None,
    at_end: Callable[[Callable[[], None]], object] | None = None,
) -> tuple[Engine, ModelDescription]:
    """Loads and warms up everything that computes; blocks for seconds, or minutes if the model must be fetched.

    `at_end` is given what ends the threads of kernels and copies, to be called when no step will follow.
    """
    path, name = Path(settings.model), settings.model_name
    if not settings.model:
        path = ensure_default_model(on_progress=lambda text: _log.info("model_fetching", progress=text))
        name = name or DEFAULT_MODEL.name
    dtype = choose_dtype(settings.dtype)
    _log.info("model_loading", path=str(path), dtype=str(dtype))
    model = load_model(path, dtype, name)
    _log.info("model_loaded", name=model.config.name, layers=model.config.num_layers)
    num_blocks = KVLayout.of(model.config, settings.block_size, dtype).num_blocks_in(settings.kv_cache_mib)
    runner = ModelRunner(
        model.config,
        model.tensors,
        backend=load_backend(settings.kernels),
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        sampler=Sampler(model.config.vocab_size, model.text.eos_token_ids),
        window=Window(settings.kv_window_tokens, settings.kv_sink_tokens) if settings.kv_window_tokens else None,
        num_threads=settings.threads,
    )
    _log.info("warming_up", kv_blocks=num_blocks, threads=settings.threads)
    runner.warm_up()
    _check_language(runner, model)
    pool = BlockPool(num_blocks)
    digest = keyed_digest(secrets.token_bytes(32))  # nobody outside this process can predict a block's key
    mode = MODES[settings.scheduling_mode]
    prefix_cache = settings.prefix_cache and mode.prefix_cache
    copier = make_copier(runner.storage, settings.swap_mib) if prefix_cache else None
    manager = CacheManager(
        pool,
        settings.block_size,
        digest,
        prefix_cache=prefix_cache,
        windows=runner.windows,
        max_chunk_tokens=settings.max_num_batched_tokens,
        host=None if copier is None else HostTier(pool, copier.num_slots, lambda: copier.block_s),
    )
    bounds = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_chunk_tokens=settings.max_num_batched_tokens,
        step_budget_s=settings.step_budget_ms / 1000,
        first_chunk_s=settings.first_chunk_ms / 1000,
        long_after_steps=settings.long_after_steps,
        hand_back_s=settings.hand_back_s,
        gather_s=settings.gather_ms / 1000,
    )
    scheduler = Scheduler(manager, bounds, mode)
    description = describe(model, settings, num_blocks=pool.num_usable, windows=runner.windows)
    now = (clock or SystemClock()).monotonic
    eos_token_ids = model.text.eos_token_ids
    engine = Engine(runner, scheduler, manager, description.limits, eos_token_ids, now, tracer, copier=copier)
    if at_end is not None:
        at_end(runner.close)
        if copier is not None:
            at_end(copier.close)
    return engine, description


def _check_language(runner: ModelRunner, model: LoadedModel) -> None:
    """Warns if the model, as loaded, does not know plain English: then weights, rotations or tokens are not its own."""
    if runner.num_blocks // len(runner.windows) * runner.block_size < MIN_CHECK_TOKENS:
        return
    found = perplexity(runner, model.text)
    log = _log.warning if found > math.sqrt(model.config.vocab_size) else _log.info
    log("model_checked", perplexity=round(found, 1), vocab_size=model.config.vocab_size)


def describe(
    model: LoadedModel, settings: WorkerSettings, *, num_blocks: int, windows: Windows = (None,)
) -> ModelDescription:
    """What gateways are told about the model."""
    trained = model.config.max_positions
    limits = ModelLimits(
        model=model.config.name,
        context_length=min(trained, settings.context_limit or trained),
        vocab_size=model.config.vocab_size,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_num_seqs=settings.max_num_seqs,
        windows=windows,
        max_chunk_tokens=settings.max_num_batched_tokens,
    )
    text = model.text
    return ModelDescription(
        limits=limits,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        eos_token_ids=text.eos_token_ids,
        bos_token_id=text.bos_token_id,
        add_bos_token=text.add_bos_token,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
    )


@contextlib.contextmanager
def _open_trace(path: str) -> Iterator[Tracer | None]:
    """Records into a file until the end, or not at all if there is no path. Raises OSError if it cannot be written."""
    if not path:
        yield None
        return
    with contextlib.closing(ChromeTrace(Path(path).open("w", encoding="utf-8"))) as trace:
        _log.info("steps_recorded", trace=path)
        yield trace


async def _any_set(*events: asyncio.Event) -> None:
    """Returns as soon as one of them is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


async def _unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T | None:
    """The result of `work`, or None as soon as `stop` is set."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
