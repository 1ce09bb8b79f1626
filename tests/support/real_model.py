"""The real model in float32, what `transformers` makes of it, and a driver that takes prompts through an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.export import hugging_face_state, llama_config
from bench.in_process import SESSION, EngineOptions, build_engine, build_runner
from common.types import FinishReason, PositionLogprobs, SamplingParams
from tests.support.prompts import Prompt
from worker.cache.host import Copier
from worker.cache.manager import CacheManager
from worker.engine.batch import Batch, SampledToken
from worker.engine.events import RequestOutput
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.model.loaded_model import LoadedModel
from worker.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reference generates, and by how many logits its closest decision was made."""

    token_ids: list[int]
    least_margin: float


@torch.inference_mode()
def greedy_reference(model: LoadedModel, prompts: Sequence[Prompt]) -> dict[str, Expected]:
    """Greedy output of `transformers` by prompt name, one prompt after the other, end tokens taken like any other."""
    with torch.device("meta"):
        reference = LlamaForCausalLM(LlamaConfig(**llama_config(model.config)))
    reference.load_state_dict(hugging_face_state(model.tensors), strict=not model.config.tie_embeddings, assign=True)
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)  # has buffers, but no weights
    reference.eval()
    expected = {}
    for prompt in prompts:
        output = reference.generate(
            torch.tensor([prompt.token_ids]),
            attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=prompt.num_output,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(output.logits).topk(2).values
        expected[prompt.name] = Expected(
            output.sequences[0, len(prompt.token_ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())
        )
    return expected


class Runners:
    """Runners of the real model by block size: packing weights takes seconds, so tests share them."""

    def __init__(self, model: LoadedModel, options: EngineOptions) -> None:
        self.model = model
        self.options = options
        self._runners: dict[int, ModelRunner] = {}

    def of(self, block_size: int) -> ModelRunner:
        """The runner with blocks of so many tokens."""
        if block_size not in self._runners:
            self._runners[block_size] = build_runner(self.model, replace(self.options, block_size=block_size))
        return self._runners[block_size]


class SmallPool:
    """A runner of which only the first blocks are used."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        assert num_blocks <= runner.num_blocks
        self._runner = runner
        self.num_blocks = num_blocks
        self.block_size = runner.block_size

    def execute(self, batch: Batch) -> Sequence[SampledToken | None]:
        return self._runner.execute(batch)


class PreemptingScheduler(Scheduler):
    """Preempts every running request with a given probability before each step, whatever it is in the midst of."""

    def __init__(self, manager: CacheManager, config: SchedulerConfig, *, rng: random.Random, probability: float):
        super().__init__(manager, config)
        self._rng = rng
        self._probability = probability

    def schedule(self, now_s: float = 0.0) -> Batch:
        batch = super().schedule(now_s)
        victims = [request for request in self.running if self._rng.random() < self._probability]
        for request in victims:
            self.preempt(request)
        return Batch(tuple(row for row in batch.rows if row.request not in victims))


def drawn_clock(rng: random.Random) -> Callable[[], float]:
    """Seconds that advance at random, so that steps bounded in time get chunks of all sizes."""
    now = 0.0

    def read() -> float:
        nonlocal now
        now += rng.uniform(0.0, 0.05)
        return now

    return read


@dataclass(slots=True)
class Job:
    """One request of a run: when it comes, and after how many of its tokens it is aborted, if ever."""

    name: str
    prompt: Sequence[int]
    sampling: SamplingParams
    arrival_step: int = 0
    abort_after: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0


@dataclass
class Session:
    """An engine that takes jobs, step by step, and audits itself after each."""

    runners: Runners
    block_size: int = 16
    chunk: int = 512  # tokens of one request in a step
    batch_tokens: int = 512  # tokens in a step
    max_num_seqs: int = 64
    num_blocks: int | None = None  # None: all that the runner has
    prefix_cache: bool = True
    make_scheduler: Callable[[CacheManager, SchedulerConfig], Scheduler] = Scheduler
    now: Callable[[], float] | None = None  # None: time stands still, and does not bound steps
    copier: Copier | None = None  # over the runner's storage; None: preempted requests are computed again
    copy_s: Callable[[], float] | None = None  # what copying a block takes; None: as measured
    disturb: Callable[[Session], None] | None = None  # called between steps

    def __post_init__(self) -> None:
        runner = self.runners.of(self.block_size)
        executor = runner if self.num_blocks is None else SmallPool(runner, self.num_blocks)
        options = replace(
            self.runners.options,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.batch_tokens,
            max_chunk_tokens=self.chunk,
            prefix_cache=self.prefix_cache,
        )
        self.engine, self.manager = build_engine(
            self.runners.model, executor, options, self.make_scheduler, self.now, self.copier, self.copy_s
        )
        self.peak_running = self.num_preemptions = self.num_recomputed = self.num_loaded = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Takes all jobs to their end."""
        waiting = sorted(jobs, key=lambda job: job.arrival_step)[::-1]
        active: dict[str, Job] = {}
        step = 0
        while waiting or active:
            while waiting and waiting[-1].arrival_step <= step and self.engine.num_requests < self.max_num_seqs:
                job = waiting.pop()
                active[job.name] = job
                self.engine.submit(SESSION, job.name, 1, job.prompt, job.sampling)
            self._step(active)
            step += 1
        self._audit()
        assert self.manager.counts.referenced == 0

    @property
    def scheduler(self) -> Scheduler:
        """The engine's, to preempt with."""
        return self.engine._scheduler

    def take_free_blocks(self, count: int) -> None:
        """Has blocks overwritten, as if somebody had held and left them."""
        pool = self.manager.pool
        for block_id in [self.manager._take() for _ in range(min(count, pool.num_free))]:
            pool.release(block_id)

    def _step(self, active: dict[str, Job]) -> None:
        if self.disturb is not None:
            self.disturb(self)
        output = self.engine.step()
        assert output.error is None
        self.peak_running = max(self.peak_running, output.stats.running)
        self.num_preemptions += output.stats.num_preemptions
        self.num_recomputed += output.stats.num_recomputed_tokens
        self.num_loaded += output.stats.num_loaded_tokens
        if news := output.sessions.get(SESSION):
            assert not news.rejected
            for told in news.outputs:
                self._take(told, active)
        self._audit()

    def _take(self, told: RequestOutput, active: dict[str, Job]) -> None:
        job = active[told.request_id]
        job.token_ids.extend(told.token_ids)
        job.logprobs.extend(told.logprobs)
        job.finish_reason = told.finish_reason
        job.num_cached += told.cached_prompt_tokens
        if told.finish_reason is not None:
            del active[told.request_id]
        elif job.abort_after is not None and len(job.token_ids) >= job.abort_after:
            assert self.engine.abort(SESSION, told.request_id, 1)

    def _audit(self) -> None:
        self.engine.check_integrity()
        assert self.manager.counts.total == len(self.manager.pool.blocks)
