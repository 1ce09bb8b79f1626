"""Random lives of many requests in a tiny pool, in every mode and with levels that yield early: right tokens, exact
books, one terminal event each, always an end."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import InvalidRequestError, LimitExceededError
from common.types import Band, FinishReason, Reason
from common.window import Window
from tests.support.fake_executor import generate
from tests.unit.worker.engine.rig import VOCAB_SIZE, EngineRig, Name, reason_of
from worker.cache.manager import HOLE
from worker.engine.executor import ExecutionError, SamplingError
from worker.engine.modes import MODES

PROMPTS = st.builds(  # many share a prefix
    lambda stem, cut, tail: (stem[:cut] + tail) or [0],
    st.sampled_from([[1] * 12, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4], list(range(20))]),
    st.integers(0, 20),
    st.lists(st.integers(0, 3), max_size=5),
)
STOP_TOKENS = range(0, VOCAB_SIZE, 17)  # about every seventeenth token ends a request


class EngineMachine(RuleBasedStateMachine):
    own_windows: tuple[Window | None, ...] = (None,)  # that requests ask for

    @initialize(
        num_blocks=st.integers(5, 12),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 4),
        spare_budget=st.integers(0, 12),
        max_chunk=st.integers(1, 9),
        watermark_blocks=st.integers(0, 2),
        prefix_cache=st.sampled_from([True, True, False]),
        mode=st.sampled_from([*MODES, "full", "full", "full", "full", "paged"]),
        levels=st.fixed_dictionaries(
            {
                "long_after_steps": st.integers(0, 6),
                "grace_steps": st.integers(0, 4),
                "max_preemptions": st.integers(0, 3),
                "max_overtakes": st.integers(0, 3),
                "min_chunk_tokens": st.integers(1, 8),
                "optimism": st.floats(0, 1),
                "output_share": st.floats(0, 1),
                "max_thrash": st.floats(0.1, 2),
                "gather_count": st.integers(0, 3),
                "hand_back_s": st.sampled_from([0.0, 0.05, 5.0]),
            }
        ),
        token_s=st.sampled_from([0.0, 0.002, 0.03]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        max_chunk: int,
        watermark_blocks: int,
        prefix_cache: bool,
        mode: str,
        levels: dict[str, Any],
        token_s: float,
    ) -> None:
        self.rig = EngineRig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + spare_budget,
            max_chunk=max_chunk,
            watermark_blocks=watermark_blocks,
            context_length=40,
            eos_token_ids=STOP_TOKENS,
            prefix_cache=prefix_cache,
            mode=mode,
            **levels,
        )
        self.rig.cost_s = lambda batch: 0.002 + token_s * batch.num_tokens
        self.max_length = min(40, num_blocks * block_size + 1)
        self.begin()

    def begin(self) -> None:
        """Nothing has happened to the rig yet."""
        self.wanted: dict[Name, tuple[list[int], FinishReason]] = {}
        self.sessions = [1]
        self.num_sessions = 1
        self.num_names = 0
        self.num_failed = 0
        self.deadlines: dict[Name, float] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        known=st.integers(0, 6),
        salt=st.sampled_from(["", "acme"]),
        band=st.sampled_from(Band),
        data=st.data(),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, known: int, salt: str, band: Band, data: st.DataObject
    ) -> None:
        session_id = data.draw(st.sampled_from(self.sessions))
        window = data.draw(st.sampled_from(self.own_windows))
        timeout_s = data.draw(st.sampled_from([None, None, None, 0.1, 100.0]))
        max_length = min(self.max_length, self.rig.limits.max_kv_tokens(window) + 1)
        self.num_names += 1
        own_salt = self.rig.salt(salt, window, len(prompt) + max_tokens)
        tokens = generate(prompt, 40, vocab_size=VOCAB_SIZE, salt=own_salt)
        length = next(  # of the output
            length
            for length in range(known + 1, 41)
            if tokens[length - 1] in STOP_TOKENS or length >= max_tokens or len(prompt) + length >= max_length
        )
        stops = tokens[length - 1] in STOP_TOKENS
        name = (session_id, f"r{self.num_names}", 1)
        try:
            self.rig.submit(
                name[1],
                prompt,
                max_tokens,
                session_id=session_id,
                output_token_ids=tokens[:known],
                cache_salt=salt,
                band=band,
                window=window,
                timeout_s=timeout_s,
                may_hand_back=data.draw(st.booleans()),
            )
        except InvalidRequestError:
            assert known >= max_tokens or len(prompt) + max(known, 1) >= max_length
        except LimitExceededError:
            assert self.rig.engine.num_requests > 16
        else:
            if timeout_s is not None:
                self.deadlines[name] = self.rig.now_s + timeout_s
            self.wanted[name] = (tokens[known:length], FinishReason.STOP if stops else FinishReason.LENGTH)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            stats = self.rig.step()
            if not stats.num_rows and self.rig.scheduler.has_requests:
                assert self.rig.engine.pause_s > 0, "a step without progress, and nothing to wait for"

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2]))
    def let_time_pass(self, seconds: float) -> None:
        self.rig.now_s += seconds

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        session_id, request_id, attempt = data.draw(st.sampled_from(sorted(self.wanted)))
        record = self.rig.records[session_id, request_id, attempt]
        was_there = not record.is_ended and session_id in self.sessions
        assert self.rig.abort(request_id, session_id=session_id, attempt=attempt) is was_there
        if was_there:
            self.rig.step()
            assert record.finish_reason is FinishReason.CANCELLED

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), is_paused=st.booleans())
    def pause_or_resume(self, data: st.DataObject, is_paused: bool) -> None:
        session_id, request_id, attempt = data.draw(st.sampled_from(sorted(self.wanted)))
        self.rig.engine.set_paused(session_id, request_id, attempt, is_paused)

    @precondition(lambda self: self.rig.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.rig.scheduler.preempt(data.draw(st.sampled_from(self.rig.scheduler.running)))

    @rule()
    def open_session(self) -> None:
        self.num_sessions += 1
        self.rig.engine.open_session(self.num_sessions)
        self.sessions.append(self.num_sessions)

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        session_id = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session_id)
        self.rig.engine.abort_session(session_id)
        for name in [name for name in self.rig.records if name[0] == session_id]:
            self.wanted.pop(name, None)
            del self.rig.records[name]

    @precondition(lambda self: self.num_failed < 2)  # more in a row would be the end of the engine
    @rule(whole=st.booleans())
    def fail_the_next_step(self, whole: bool) -> None:
        self.rig.executor.error = ExecutionError("a glitch") if whole else SamplingError({0: "a glitch"})
        self.rig.step()
        self.num_failed += 1
        self.rig.executor.error = None

    @invariant()
    def everybody_got_the_right_tokens_so_far(self) -> None:
        for name, (token_ids, finish_reason) in getattr(self, "wanted", {}).items():
            record = self.rig.records[name]
            assert record.token_ids == token_ids[: len(record.token_ids)]
            if record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (record.token_ids, record.finish_reason) == (token_ids, finish_reason)
            if record.rejected is not None and reason_of(record) is Reason.DEADLINE:
                assert self.deadlines[name] <= self.rig.now_s
            else:
                assert record.rejected is None or (self.num_failed and reason_of(record) is Reason.INTERNAL)

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check_integrity()

    @invariant()
    def whoever_runs_has_blocks_or_their_promise_for_all_its_tokens_but_the_last(self) -> None:
        if hasattr(self, "rig"):
            for request in self.rig.scheduler.running:
                if request.windows:  # then it gets them by and by
                    continue
                num_blocks = len(request.block_ids) + request.num_promised
                assert num_blocks * self.rig.manager.block_size >= request.num_tokens - 1

    @invariant()
    def the_books_know_how_many_tokens_are_held(self) -> None:
        if hasattr(self, "rig") and not self.rig.scheduler._staying:
            size = self.rig.manager.block_size
            held: dict[int, int] = {}  # tokens by block; shared ones are full
            for request in self.rig.scheduler.running:
                for place, block_id in enumerate(request.block_ids):
                    index = place // self.rig.manager.num_tables
                    if block_id != HOLE:
                        held[block_id] = min(size, max(0, request.num_computed - index * size))
            assert self.rig.scheduler.num_held_tokens == sum(held.values())

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for name in self.wanted:
                self.rig.engine.set_paused(*name, False)
            self.rig.run(max_steps=3000)
            self.everybody_got_the_right_tokens_so_far()
            self.rig.assert_idle()
            for session_id in self.sessions:
                claims = [(claim.request_id, claim.attempt) for claim in self.rig.accounted[session_id]]
                assert sorted(claims) == sorted(name[1:] for name in self.rig.records if name[0] == session_id)


EngineMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestEngine = EngineMachine.TestCase
