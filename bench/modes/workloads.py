"""What the modes are measured on: requests with lengths known to the measurement and unknown to the scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.load import arrivals
from bench.load.shapes import Caps, Prefix, Shape, TokenSource, fit, from_trace
from bench.traces import Trace
from bench.workload import Kind

LONG_TOKENS = 128
"""An output from here on is long: mode full lets a request yield after so many decode steps."""

SYSTEM_PROMPT: Prefix = ("system prompt", 48)
"""All requests of the mixes begin with the same tokens, as those of one application do."""

SHORT = Kind("short", up_to=1.0, prompt=(64, 160), output=(8, 96))
LONG = Kind("long", up_to=1.0, prompt=(64, 160), output=(150, 300))
MIXES = {"short only": 0.0, "30 % long": 0.3}
"""Share of long requests by the mix's name."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request; it ends after `num_output` tokens, and asks for as many as the longest of its workload."""

    name: str
    prompt: tuple[int, ...]
    num_output: int

    @property
    def is_long(self) -> bool:
        """Whether it counts as a long request."""
        return self.num_output >= LONG_TOKENS


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival, and when they would arrive at one request a second on average."""

    name: str
    jobs: tuple[Job, ...]
    unit_arrivals: tuple[float, ...]  # seconds
    note: str = ""  # what was done to a trace

    @property
    def max_tokens(self) -> int:
        """What every request asks for: nobody knows how long an answer will be."""
        return max(job.num_output for job in self.jobs)

    @property
    def num_output(self) -> int:
        """Output tokens of all jobs."""
        return sum(job.num_output for job in self.jobs)

    @property
    def num_long(self) -> int:
        """Long requests among the jobs."""
        return sum(job.is_long for job in self.jobs)

    def describe(self) -> dict[str, object]:
        """What a result must state of the requests."""
        return {
            "name": self.name,
            "requests": len(self.jobs),
            "long_requests": self.num_long,
            "prompt_tokens": sum(len(job.prompt) for job in self.jobs),
            "output_lens": [job.num_output for job in self.jobs],
            "max_tokens": self.max_tokens,
            "note": self.note,
        }


def mix(name: str, num_requests: int, *, seed: int, vocab_size: int, scale: float = 1.0) -> Workload:
    """One of `MIXES`, with exactly its share of long requests; `scale` multiplies all lengths.

    Raises KeyError if there is no such mix.
    """
    rng = random.Random(f"{seed}/{name}")
    num_long = round(MIXES[name] * num_requests)
    kinds = [LONG] * num_long + [SHORT] * (num_requests - num_long)
    rng.shuffle(kinds)
    prefix, length = SYSTEM_PROMPT
    shared = ((prefix, int(length * scale)),)
    shapes = [
        Shape(
            kind.name,
            max(1, int(rng.randint(*kind.prompt) * scale)),
            max(1, int(rng.randint(*kind.output) * scale)),
            shared,
        )
        for kind in kinds
    ]
    poisson = arrivals.gamma(num_requests, 1.0, 1.0, rng)
    return Workload(name, _jobs(shapes, name, seed, vocab_size), tuple(poisson))


def replayed(trace: Trace, *, scale: float, max_tokens: int, seed: int, vocab_size: int) -> Workload:
    """A trace's requests, their lengths times `scale`, cut so that prompt and longest output fit `max_tokens`.

    Arrivals keep the trace's pattern; a trace without any gets Poisson arrivals.
    """
    fitted = fit(
        from_trace(trace, scale=scale),
        Caps(context_length=max_tokens, max_prompt=max_tokens // 2, max_output=max_tokens // 2),
    )
    num_requests = len(fitted.shapes)
    own = [shape.arrival_s for shape in fitted.shapes if shape.arrival_s is not None]
    if len(own) == num_requests:
        times = arrivals.from_trace(own, rate=1.0)
    else:
        times = arrivals.gamma(num_requests, 1.0, 1.0, random.Random(seed))
    last_row = trace.first_row + num_requests + trace.num_empty
    note = (
        f"rows {trace.first_row}:{last_row} of {trace.num_rows_in_file}, lengths times {scale:g}, "
        f"{fitted.num_clipped} requests shortened to {max_tokens // 2} tokens of prompt or output"
    )
    return Workload(trace.path.stem, _jobs(fitted.shapes, trace.path.stem, seed, vocab_size), tuple(times), note)


def _jobs(shapes: Sequence[Shape], name: str, seed: int, vocab_size: int) -> tuple[Job, ...]:
    source = TokenSource(f"{seed}/{name}", vocab_size)
    return tuple(Job(f"r{index}", source.prompt(shape), shape.num_output) for index, shape in enumerate(shapes))
