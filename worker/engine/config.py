"""What bounds a step, and what the scheduler may weigh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step. Raises ValueError if a bound would keep a request from ever advancing."""

    max_num_seqs: int  # running requests, each in a slot of its own
    max_num_batched_tokens: int  # tokens computed per step; more lengthen every running request's gap
    max_chunk_tokens: int  # tokens of one request per step; less leaves more of the budget to others
    watermark_blocks: int = 0  # kept free at admission while something runs; more means fewer preemptions
    step_budget_s: float = 0.05  # what a step with chunks may take, by the cost model; decodes ride regardless
    first_chunk_s: float = 0.1  # from arrival to the step with the first chunk
    min_chunk_tokens: int = 32  # of a first chunk while others wait for theirs; half of it if there are many
    long_after_steps: int = 128  # decode steps since admission or resume after which a request yields
    grace_steps: int = 16  # after a resume, in which others of its band are preempted before it
    max_preemptions: int = 16  # of a request; then it yields no slot, and blocks only if everybody else is there, too
    hand_back_s: float = 5.0  # a preempted long request waits so long for memory, then another worker may have it
    max_overtakes: int = 16  # later arrivals admitted before a request that waits for memory
    optimism: float = 0.8  # 0 plans memory for max_tokens of everybody, 1 for the share that requests really use
    output_share: float = 0.3  # of max_tokens that a request is expected to use, until the finished ones tell
    max_thrash: float = 0.1  # tokens computed again per token computed; from here on it is planned without optimism
    gather_s: float = 0.05  # client mode: how long the first of a batch waits for others
    gather_count: int = 0  # client mode: requests that end the wait at once; 0: as many as there are slots

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk_tokens", "min_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        for name in (
            "watermark_blocks",
            "first_chunk_s",
            "long_after_steps",
            "grace_steps",
            "max_preemptions",
            "hand_back_s",
            "max_overtakes",
            "gather_s",
            "gather_count",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 0 is needed")
        for name in ("step_budget_s", "max_thrash"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, more than 0 is needed")
        for name in ("optimism", "output_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed are 0 to 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; every running request decodes in every "
                f"step, which needs at least max_num_seqs = {self.max_num_seqs}"
            )
