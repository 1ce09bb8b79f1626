"""A worker to be diagnosed: the real engine with its real metrics, in simulated time unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest

from bench.doctor.snapshot import Reading, Snapshot
from bench.levels import Machine, SimulatedMachine
from common.metrics import GatewayMetrics, WorkerMetrics
from common.types import ModelLimits, SamplingParams
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.engine import Engine
from worker.engine.modes import MODES
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.telemetry import observe_step


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a worker is started."""

    max_num_seqs: int
    max_num_batched_tokens: int
    step_budget_s: float
    first_chunk_s: float


Lengths = tuple[int, int]
"""Tokens of a prompt and of its answer."""


class Patient:
    """Serves so many users, each of whom asks again when the answer has ended, after a pause."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        num_blocks: int = 4097,
        mode: str = "full",
        machine: Machine | None = None,
        vocab_size: int = 40_000,
    ) -> None:
        self._vocab_size = vocab_size
        self._registry = CollectorRegistry()
        self._metrics = WorkerMetrics(self._registry)
        self._metrics.set_bounds(**asdict(bounds))
        self._machine: Machine = machine or SimulatedMachine(num_blocks)
        executor = self._machine.executor
        manager = CacheManager(
            BlockPool(executor.num_blocks), executor.block_size, keyed_digest(b"clinic"), prefix_cache=True
        )
        config = SchedulerConfig(
            bounds.max_num_seqs,
            bounds.max_num_batched_tokens,
            bounds.max_num_batched_tokens,
            step_budget_s=bounds.step_budget_s,
            first_chunk_s=bounds.first_chunk_s,
        )
        scheduler = Scheduler(manager, config, MODES[mode])
        limits = ModelLimits(
            "patient", 8192, vocab_size, executor.block_size, executor.num_blocks - 1, bounds.max_num_seqs
        )
        self._engine = Engine(executor, scheduler, manager, limits, (), self._machine.now, max_waiting=10**6)
        self._engine.open_session(1)
        self._num_asked = 0

    def live(self, seconds: float, num_users: int, lengths: Lengths, pause_s: float = 0.0) -> None:
        """Serves for about so long; whoever is served at the end is served on by the next call."""
        until_s = self._machine.now() + seconds
        pending = [self._machine.now()] * max(0, num_users - self._engine.num_requests)
        while self._machine.now() < until_s:
            while pending and pending[0] <= self._machine.now():
                pending.pop(0)
                self._ask(lengths)
            if not self._engine.num_requests:
                self._machine.wait_until(min(until_s, pending[0]))
                continue
            started_s = self._machine.now()
            output = self._engine.step()
            now_s = self._machine.now()
            observe_step(self._metrics, output, now_s - started_s)
            for news in output.sessions.values():
                assert not news.rejected
                pending += [now_s + pause_s for told in news.outputs if told.finish_reason is not None]

    def snapshot(self, gateway: Callable[[], Reading] | None = None) -> Snapshot:
        """What its endpoint would say now."""
        worker = Reading.parse(generate_latest(self._registry).decode())
        return Snapshot(self._machine.now(), (worker,), () if gateway is None else (gateway(),))

    def _ask(self, lengths: Lengths) -> None:
        num_prompt, num_output = lengths
        self._num_asked += 1
        first = self._num_asked
        prompt = tuple(
            100 + (first * 7919 + position * first) % (self._vocab_size - 1000) for position in range(num_prompt)
        )
        sampling = SamplingParams(seed=0, max_tokens=num_output, temperature=0.0, ignore_eos=True)
        self._engine.submit(1, f"r{first}", 1, prompt, sampling)


class FrontDesk:
    """A gateway's metrics, moved by hand."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = GatewayMetrics(self._registry)

    def reading(self) -> Reading:
        return Reading.parse(generate_latest(self._registry).decode())
