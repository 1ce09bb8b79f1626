"""Machines in simulated time, and workloads for them."""

from __future__ import annotations

from bench.levels import CONTEXT, SimulatedMachine
from bench.modes.workloads import Job, Workload
from common.types import ModelLimits

VOCAB_SIZE = 40_000
LIMITS = ModelLimits("simulated", CONTEXT, VOCAB_SIZE, 16, 255, 64)
"""Slots and blocks are the trial's own."""


def machine(num_blocks: int = 256) -> SimulatedMachine:
    return SimulatedMachine(num_blocks)


def workload(lengths: list[int], *, num_prompt: int = 20, gap_s: float = 1.0) -> Workload:
    """Requests of these output lengths whose prompts share nothing."""
    jobs = tuple(
        Job(f"r{index}", tuple(range(100 * index + 100, 100 * index + 100 + num_prompt)), length)
        for index, length in enumerate(lengths)
    )
    return Workload("made", jobs, tuple(gap_s * index for index in range(len(lengths))))
