"""A request as the engine sees it: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.types import Band, FinishReason, SamplingParams
from common.window import Windows
from worker.cache.block import BlockKey


class RequestState(Enum):
    """WAITING -> RUNNING -> FINISHED; RUNNING -> WAITING on preemption; any -> FINISHED on abort."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One attempt of one request. Owned by the engine; only the scheduler and the engine's update write to it.

    `token_ids` is prompt + output and only ever grows. `num_computed` tokens of it have their KV in the blocks of
    `block_ids`; it chases `num_tokens` (no phases: prefill chunk, decode and recompute are the same operation).
    """

    request_id: str
    attempt: int
    session_id: int
    token_ids: list[int]
    num_prompt_tokens: int  # of the original prompt; output of earlier attempts counts as output
    sampling: SamplingParams
    band: Band
    cache_salt: str
    arrival: int  # grows with every submit to this engine; kept over preemption
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    windows: Windows = ()  # what the layers of each block table see of it; empty: everything
    # For every block of tokens one entry per block table of the model (see worker/cache/groups), table after table.
    # Append-only between admission and preemption, but for blocks that left the window: they become 0.
    block_ids: list[int] = field(default_factory=list)
    num_holes: int = 0  # of them, those that are 0
    num_promised: int = 0  # blocks that are its own to take, and still in the pool
    num_reserved: int = 0  # tokens that admission covers; with a window, by and by
    slot: int = -1  # row in the executor's state tables while RUNNING, else -1
    admissions: int = 0  # grows at every admission: tells the executor that the slot's row starts anew
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # tokens found in the prefix cache at first admission
    num_given_tokens: int = 0  # tokens known at submit: the prompt, and output of earlier attempts
    deadline_s: float | None = None  # when its client gives up, by the engine's clock
    may_hand_back: bool = False  # whether another worker can go on with it
    is_paused: bool = False  # its reader is slow: nothing is computed for it, and it is the first to make way
    left_s: float = 0.0  # when it was preempted last, by the engine's clock
    stop_ids: frozenset[int] = frozenset()  # end generation: stop token ids, and the model's unless ignore_eos
    max_total_tokens: int = 0  # prompt + output at most: by max_tokens, by the context, by the pool
    num_lost: int = 0  # computed tokens that the last preemption dropped
    arrived_s: float = 0.0  # when it came to this worker, by the engine's clock
    started_s: float | None = None  # when the step with its first chunk began; None until then
    first_step: int = 0  # the step that admitted it first
    entry_step: int = 0  # the step that admitted it last
    left_step: int = 0  # the step that preempted it last
    num_waited_steps: int = 0  # between its preemptions and its returns
    entry_tokens: int = 0  # tokens known then; those beyond are its consecutive decode steps
    num_shared_blocks: int = 0  # of its blocks, those that somebody else held already when it was admitted
    num_overtaken: int = 0  # later arrivals admitted while it waited for memory
    block_keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_published: int = 0  # leading blocks that are hittable, by this request or before it

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by this and earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, attempt={self.attempt}, {self.state.value}, computed {self.num_computed} of "
            f"{self.num_tokens} tokens, {len(self.block_ids)} blocks)"
        )
