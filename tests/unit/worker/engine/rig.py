"""An engine over a fake executor, with every event recorded and the books audited after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.types import BlockUsage, ClaimRef, FinishReason, ModelLimits, Reason, SamplingParams
from common.window import Window, Windows, salt_of
from tests.support.fake_executor import FakeCopier, FakeExecutor, generate
from worker.cache.block import keyed_digest
from worker.cache.host import HostTier
from worker.cache.manager import CacheManager
from worker.cache.pool import BlockPool
from worker.engine.batch import Batch, SampledToken
from worker.engine.engine import Engine
from worker.engine.events import RequestRejected, StepStats
from worker.engine.modes import DEFAULT_MODE, MODES
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.engine.trace import Tracer

VOCAB_SIZE = 1000
SESSION = 1
Name = tuple[int, str, int]


@dataclass
class Record:
    """All that a session was told of one attempt."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    rejected: RequestRejected | None = None
    is_handed_back: bool = False
    cached_prompt_tokens: list[int] = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        return self.finish_reason is not None or self.rejected is not None or self.is_handed_back


class EngineRig:
    """`num_blocks` usable blocks; the null block comes on top."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 32,
        max_chunk: int = 16,
        watermark_blocks: int = 0,
        context_length: int = 4096,
        eos_token_ids: Sequence[int] = (),
        prefix_cache: bool = True,
        mode: str = DEFAULT_MODE,
        window: Window | None = None,
        windows: Windows = (),
        host_slots: int = 0,
        block_s: float = 1e-9,
        copy_delay: int = 0,
        tracer: Tracer | None = None,
        **bounds: Any,
    ) -> None:
        """`bounds` are further fields of SchedulerConfig; unless told otherwise it plans no memory for any output."""
        bounds = {"optimism": 1.0, "output_share": 0.0} | bounds
        self.now_s = 0.0
        windows = windows or (window,)
        self.executor = FakeExecutor(
            num_blocks + 1, block_size, vocab_size=VOCAB_SIZE, max_num_seqs=max_num_seqs, windows=windows
        )
        self.pool = BlockPool(num_blocks + 1)
        self.copier = FakeCopier(self.executor, host_slots, block_s=block_s, delay=copy_delay) if host_slots else None
        self.host = HostTier(self.pool, host_slots, lambda: block_s) if host_slots else None
        self.manager = CacheManager(
            self.pool,
            block_size,
            keyed_digest(b"test"),
            prefix_cache=prefix_cache and MODES[mode].prefix_cache,
            windows=windows,
            max_chunk_tokens=max_chunk,
            host=self.host,
        )
        self.scheduler = Scheduler(
            self.manager, SchedulerConfig(max_num_seqs, budget, max_chunk, watermark_blocks, **bounds), MODES[mode]
        )
        self.limits = limits = ModelLimits(
            "fake", context_length, VOCAB_SIZE, block_size, num_blocks, max_num_seqs, windows, max_chunk
        )
        self.engine = Engine(
            self.executor,
            self.scheduler,
            self.manager,
            limits,
            eos_token_ids,
            lambda: self.now_s,
            tracer,
            copier=self.copier,
        )
        self.engine.open_session(SESSION)
        self.cost_s: Callable[[Batch], float] = lambda batch: 0.0
        self._execute = self.executor.execute
        self.executor.execute = self._take_time  # type: ignore[method-assign]
        self.records: dict[Name, Record] = {}
        self.usage: dict[int, BlockUsage] = {}
        self.accounted: dict[int, list[ClaimRef]] = {}
        self.stats: list[StepStats] = []

    def _take_time(self, batch: Batch) -> list[SampledToken | None]:
        """Executes, and lets the clock go on by what that costs."""
        sampled = self._execute(batch)
        self.now_s += self.cost_s(batch)
        return sampled

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        session_id: int = SESSION,
        attempt: int = 1,
        sampling: dict[str, Any] | None = None,
        window: Window | None = None,
        **options: Any,
    ) -> None:
        """`window`: of the request's own."""
        sampling = dict(sampling or {})
        if window is not None:
            sampling |= {"kv_window_tokens": window.num_tokens, "kv_sink_tokens": window.num_sinks}
        params = SamplingParams(seed=1, max_tokens=max_tokens, **sampling)
        self.engine.submit(session_id, request_id, attempt, prompt, params, **options)
        self.records[session_id, request_id, attempt] = Record()

    def salt(self, salt: str, window: Window | None, max_length: int) -> str:
        """Under which the blocks of a request with such a window of its own are cached, if it may get so long."""
        if window is None or self.limits.narrowed(window) == self.limits.windows:
            return salt
        return salt_of(salt, window) if window.num_tokens < min(max_length, self.limits.context_length) else salt

    def abort(self, request_id: str, *, session_id: int = SESSION, attempt: int = 1) -> bool:
        return self.engine.abort(session_id, request_id, attempt)

    def step(self) -> StepStats:
        """One step, its events recorded, everything audited."""
        output = self.engine.step()
        self.engine.check_integrity()
        for session_id, news in output.sessions.items():
            for event in news.outputs:
                record = self.records[session_id, event.request_id, event.attempt]
                assert not record.is_ended, f"{event} after the terminal event"
                assert event.token_ids or event.finish_reason is not None, f"{event} says nothing"
                record.token_ids += event.token_ids
                record.finish_reason = event.finish_reason
                record.cached_prompt_tokens.append(event.cached_prompt_tokens)
            for rejected in news.rejected:
                record = self.records[session_id, rejected.request_id, rejected.attempt]
                assert not record.is_ended, f"{rejected} after the terminal event"
                record.rejected = rejected
            for handed_back in news.handed_back:
                record = self.records[session_id, handed_back.request_id, handed_back.attempt]
                assert not record.is_ended, f"{handed_back} after the terminal event"
                record.is_handed_back = True
            if news.usage is not None:
                self.usage[session_id] = news.usage
                self.accounted.setdefault(session_id, []).extend(news.usage.accounted)
        self.stats.append(output.stats)
        return output.stats

    def run(self, max_steps: int = 2000) -> None:
        """Steps until there is nothing left to do; the clock goes on where requests only gather."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.now_s += self.engine.pause_s
            self.step()
        raise AssertionError(
            f"still busy after {max_steps} steps: {self.scheduler.running} {list(self.scheduler.waiting)}"
        )

    @property
    def handed_back(self) -> list[Name]:
        return [name for name, record in self.records.items() if record.is_handed_back]

    def of(self, request_id: str, *, session_id: int = SESSION, attempt: int = 1) -> Record:
        return self.records[session_id, request_id, attempt]

    def assert_generated(self, request_id: str, prompt: Sequence[int], num_tokens: int, *, salt: str = "") -> None:
        """The request ended by length with exactly what it would have generated alone."""
        record = self.of(request_id)
        assert record.token_ids == generate(prompt, num_tokens, vocab_size=VOCAB_SIZE, salt=salt)
        assert record.finish_reason is FinishReason.LENGTH

    def assert_idle(self) -> None:
        """Every request has ended, nobody holds a block or a slot."""
        assert all(record.is_ended for record in self.records.values())
        assert self.pool.counts.referenced == 0
        assert self.engine.num_requests == 0
        assert self.scheduler.num_open_slots == self.scheduler.config.max_num_seqs


def reason_of(record: Record) -> Reason | None:
    return record.rejected.reason if record.rejected else None
