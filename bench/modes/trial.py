"""One engine of one mode serves one workload: what came when, and what the device did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.levels import Machine
from bench.modes.workloads import Job, Workload
from common.types import ModelLimits, SamplingParams
from worker.cache.block import keyed_digest
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.batch import Batch, BatchRow, SampledToken
from worker.engine.engine import Engine
from worker.engine.executor import Executor
from worker.engine.modes import MODES
from worker.engine.scheduler import Scheduler, SchedulerConfig

SESSION = 1
STOP_ID = 0
"""The token that ends every request; whatever the model says, it comes where the workload wants it, and only there."""


class TrialError(Exception):
    """A request failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a trial's engine is built."""

    mode: str
    max_num_seqs: int
    max_num_batched_tokens: int = 512
    step_budget_s: float = 0.05  # mode full

    def __str__(self) -> str:
        return f"{self.mode}, {self.max_num_seqs} slots"


@dataclass(slots=True)
class Times:
    """One request's moments, in seconds from the trial's start."""

    scheduled_s: float
    is_long: bool
    token_s: list[float] = field(default_factory=list)
    end_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """First token - scheduled arrival."""
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first token) / (output tokens - 1); None for fewer than two tokens."""
        count = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (count - 1) if count > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """End - scheduled arrival."""
        return None if self.end_s is None else self.end_s - self.scheduled_s


@dataclass(slots=True)
class Trial:
    """One workload served by one engine."""

    workload: str
    setting: Setting
    rate: float | None  # requests a second that were offered; None: all at once
    seconds: float = 0.0
    times: list[Times] = field(default_factory=list)
    num_output: int = 0
    busy_s: float = 0.0  # a step was computed
    row_s: float = 0.0  # the same, times the rows of the step
    stored_s: float = 0.0  # the same, times the share of the pool's token slots that hold a token
    referenced_s: float = 0.0  # the same, times the share of the pool's blocks that somebody holds
    num_preemptions: int = 0

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.num_output / self.seconds if self.seconds else 0.0

    @property
    def no_step_share(self) -> float:
        """Of the time, that in which no step was computed."""
        return max(0.0, 1 - self.busy_s / self.seconds) if self.seconds else 0.0

    @property
    def idle_share(self) -> float:
        """Of the slots' time, that in which no step ran or the slot was not in it."""
        return max(0.0, 1 - self.row_s / (self.seconds * self.setting.max_num_seqs)) if self.seconds else 0.0

    @property
    def kv_stored_share(self) -> float:
        """Of the pool's token slots, those that held a token: the mean over the steps, by time."""
        return self.stored_s / self.busy_s if self.busy_s else 0.0

    @property
    def kv_referenced_share(self) -> float:
        """Of the pool's blocks, those that were taken."""
        return self.referenced_s / self.busy_s if self.busy_s else 0.0

    def num_long_done_at(self, at_s: float) -> int:
        """Long requests that had ended by then."""
        return sum(times.is_long and times.end_s is not None and times.end_s <= at_s for times in self.times)


class ForcedLengths:
    """An executor that ends requests where the workload says, and takes the time of its steps."""

    def __init__(self, inner: Executor, jobs: Sequence[Job], now: Callable[[], float]) -> None:
        self._inner = inner
        self._num_output: Mapping[str, int] = {job.name: job.num_output for job in jobs}
        self._now = now
        self.step_s = 0.0  # of the last step

    @property
    def block_size(self) -> int:
        """See Executor."""
        return self._inner.block_size

    @property
    def num_blocks(self) -> int:
        """See Executor."""
        return self._inner.num_blocks

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        """See Executor."""
        start_s = self._now()
        sampled = self._inner.execute(batch)
        self.step_s = self._now() - start_s
        return [token and self._forced(row, token) for row, token in zip(batch.rows, sampled, strict=True)]

    def _forced(self, row: BatchRow, token: SampledToken) -> SampledToken:
        if row.request.num_output_tokens + 1 >= self._num_output[row.request.request_id]:
            return replace(token, token_id=STOP_ID)
        return replace(token, token_id=STOP_ID + 1) if token.token_id == STOP_ID else token


class Server:
    """An engine with an empty cache over a machine that may have served others before."""

    def __init__(self, machine: Machine, setting: Setting, workload: Workload, limits: ModelLimits) -> None:
        """`limits` are the model's; slots and blocks are replaced by those of the trial."""
        self._machine = machine
        self._workload = workload
        self._setting = setting
        mode = MODES[setting.mode]
        self._executor = ForcedLengths(machine.executor, workload.jobs, machine.now)
        self._manager = CacheManager(
            BlockPool(self._executor.num_blocks),
            self._executor.block_size,
            keyed_digest(b"bench"),
            prefix_cache=mode.prefix_cache,
        )
        config = SchedulerConfig(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_chunk_tokens=setting.max_num_batched_tokens,
            step_budget_s=setting.step_budget_s,
        )
        scheduler = Scheduler(self._manager, config, mode)
        own = replace(limits, num_blocks=self._manager.pool.num_usable, max_num_seqs=setting.max_num_seqs)
        self._engine = Engine(
            self._executor, scheduler, self._manager, own, (), machine.now, max_waiting=len(workload.jobs)
        )
        self._engine.open_session(SESSION)

    def serve(self, rate: float | None, on_end: Callable[[int], None] = lambda _num_ended: None) -> Trial:
        """Until every request has ended; `rate` requests a second arrive, or all at once. Raises TrialError.

        `on_end` is told how many have ended whenever that changes.
        """
        trial = Trial(self._workload.name, self._setting, rate)
        jobs = self._workload.jobs
        scheduled = [at / rate if rate else 0.0 for at in self._workload.unit_arrivals]
        by_name = {job.name: Times(at_s, job.is_long) for job, at_s in zip(jobs, scheduled, strict=True)}
        trial.times = list(by_name.values())
        num_sent = num_ended = 0
        start_s = self._machine.now()
        while num_sent < len(jobs) or self._engine.num_requests:
            now_s = self._machine.now() - start_s
            while num_sent < len(jobs) and scheduled[num_sent] <= now_s:
                self._submit(jobs[num_sent], start_s + scheduled[num_sent])
                num_sent += 1
            next_s = scheduled[num_sent] if num_sent < len(jobs) else None
            ended = self._go_on(trial, by_name, start_s, now_s, next_s)
            if ended:
                num_ended += ended
                on_end(num_ended)
        trial.seconds = self._machine.now() - start_s
        return trial

    def serve_users(self, num_users: int, on_end: Callable[[int], None] = lambda _num_ended: None) -> Trial:
        """A closed loop: each of so many users sends the next request as soon as its answer has ended."""
        trial = Trial(self._workload.name, self._setting, None)
        jobs = iter(self._workload.jobs)
        by_name: dict[str, Times] = {}
        num_ended = 0
        start_s = self._machine.now()
        while True:
            now_s = self._machine.now() - start_s
            while self._engine.num_requests < num_users and (job := next(jobs, None)) is not None:
                by_name[job.name] = Times(now_s, job.is_long)
                self._submit(job, start_s + now_s)
            if not self._engine.num_requests:
                break
            ended = self._go_on(trial, by_name, start_s, now_s, None)
            if ended:
                num_ended += ended
                on_end(num_ended)
        trial.times = list(by_name.values())
        trial.seconds = self._machine.now() - start_s
        return trial

    def _wake_s(self, now_s: float, next_s: float | None) -> float | None:
        """When there will be something to do; None: there is now."""
        if not self._engine.num_requests:
            return next_s
        pause_s = self._engine.pause_s
        if pause_s <= 0:
            return None
        return now_s + pause_s if next_s is None else min(now_s + pause_s, next_s)

    def _submit(self, job: Job, arrived_s: float) -> None:
        sampling = SamplingParams(
            seed=0,
            max_tokens=self._workload.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            stop_token_ids=(STOP_ID,),
        )
        self._engine.submit(SESSION, job.name, 1, job.prompt, sampling, arrived_s=arrived_s)

    def _go_on(
        self, trial: Trial, by_name: Mapping[str, Times], start_s: float, now_s: float, next_s: float | None
    ) -> int:
        """Waits until there is something to do, or does it; returns how many requests ended."""
        wake_s = self._wake_s(now_s, next_s)
        if wake_s is None:
            return self._step(trial, by_name, start_s)
        self._machine.wait_until(start_s + wake_s)
        return 0

    def _step(self, trial: Trial, by_name: Mapping[str, Times], start_s: float) -> int:
        """Returns how many requests ended."""
        output = self._engine.step()
        now_s = self._machine.now() - start_s
        num_ended = 0
        for news in output.sessions.values():
            if news.rejected:
                raise TrialError(f"{trial.setting}: {news.rejected[0]}")
            for told in news.outputs:
                times = by_name[told.request_id]
                times.token_s.extend([now_s] * len(told.token_ids))
                if told.finish_reason is not None:
                    times.end_s = now_s
                    num_ended += 1
        stats = output.stats
        trial.num_output += stats.num_sampled
        trial.num_preemptions += stats.num_preemptions
        if stats.num_rows:
            step_s = self._executor.step_s
            trial.busy_s += step_s
            trial.row_s += step_s * stats.num_rows
            num_usable = self._manager.pool.num_usable
            trial.stored_s += step_s * stats.num_held_tokens / (num_usable * self._executor.block_size)
            trial.referenced_s += step_s * stats.referenced_blocks / num_usable
        return num_ended
