"""The real model's answers are the same, bit for bit, wherever the KV blocks of preempted requests have been.

In float32 on the CPU kernels, whose sums do not depend on a row's neighbours: undisturbed, computed again, and swapped
to host memory, with log probabilities, seeds, penalties and stops.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.in_process import SESSION, EngineOptions
from common.default_model import ensure_default_model
from common.types import FinishReason, SamplingParams
from tests.support.real_model import Job, Runners, Session
from worker.cache.manager import CacheManager
from worker.cache.swap import BlockCopier
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.model.weights import load_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

BLOCK = 16
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 2**63 + 7},
    {"temperature": 1.2, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.3, "seed": 5},
    {"temperature": 1.0, "seed": 3, "stop_token_ids": tuple(range(0, 49_000, 5)), "min_tokens": 6},
)
COPY_S: dict[str, Callable[[], float] | None] = {
    "as measured": None,
    "always": lambda: -1.0,  # whatever computing takes, copying takes less
}


@pytest.fixture(scope="module")
def runners() -> Runners:
    model = load_model(ensure_default_model(), torch.float32)
    return Runners(model, EngineOptions(dtype=torch.float32, num_blocks=96, block_size=BLOCK, num_threads=1))


@pytest.fixture(scope="module")
def copier(runners: Runners) -> Iterator[BlockCopier]:
    copier = BlockCopier(runners.of(BLOCK).storage, 64)
    yield copier
    copier.close()


def make_jobs(lengths: Sequence[int], *, num_output: int = 18) -> list[Job]:
    """A request for each length of a prompt, of all kinds of sampling in turn; the prompts share their first block."""
    jobs = []
    for index, length in enumerate(lengths):
        own = random.Random(index).choices(range(100, 40_000), k=length)
        prompt = ([7] * BLOCK + own)[:length]
        sampling = SamplingParams(**({"seed": 0, "max_tokens": num_output, "logprobs": 2} | KINDS[index % len(KINDS)]))
        jobs.append(Job(f"r{index}", prompt, sampling))
    return jobs


def anew(jobs: Sequence[Job]) -> list[Job]:
    """The same requests, unanswered."""
    return [Job(job.name, job.prompt, job.sampling) for job in jobs]


def check(jobs: Sequence[Job], undisturbed: Sequence[Job]) -> None:
    for got, want in zip(jobs, undisturbed, strict=True):
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason), got.name
        assert got.logprobs == want.logprobs, got.name


def bold(manager: CacheManager, config: SchedulerConfig) -> Scheduler:
    """Expects that nobody will grow, so that blocks run out."""
    return Scheduler(manager, replace(config, optimism=1.0, output_share=0.0))


LENGTHS = (15, 16, 17, 31, 32, 33, 48)


@pytest.fixture(scope="module")
def undisturbed(runners: Runners) -> list[Job]:
    """All answers, from a pool with room for everybody."""
    jobs = make_jobs(LENGTHS)
    session = Session(runners, block_size=BLOCK)
    session.run(jobs)
    assert session.num_preemptions == 0
    assert {job.finish_reason for job in jobs} == {FinishReason.STOP, FinishReason.LENGTH}
    return jobs


@pytest.mark.parametrize("copy_s", [None, *COPY_S])
def test_where_blocks_run_out(
    runners: Runners, copier: BlockCopier, undisturbed: list[Job], copy_s: str | None
) -> None:
    """Requests of 3 to 5 blocks in a pool of 8: without host memory, and with it by cost and always."""
    session = Session(
        runners,
        block_size=BLOCK,
        num_blocks=1 + 8,
        make_scheduler=bold,
        now=time.perf_counter,
        copier=copier if copy_s else None,
        copy_s=COPY_S[copy_s] if copy_s else None,
    )
    jobs = anew(undisturbed)
    session.run(jobs)
    check(jobs, undisturbed)
    assert session.num_preemptions > 0
    assert session.num_recomputed > 0, "the last, not yet full block at least"
    if copy_s != "as measured":  # what that comes to is the machine's affair
        assert (session.num_loaded > 0) == (copy_s == "always")


@pytest.mark.parametrize("is_swapped", [False, True])
def test_at_every_place_around_a_block(runners: Runners, copier: BlockCopier, is_swapped: bool) -> None:
    """Preempted with 31, 32 and 33 computed tokens, each time with all its blocks taken by others."""
    [alone] = make_jobs([27], num_output=9)
    Session(runners, block_size=BLOCK).run([alone])
    for place in (31, 32, 33):
        preempted: list[Request] = []

        def disturb(session: Session, place: int = place, preempted: list[Request] = preempted) -> None:
            for request in list(session.scheduler.running):
                if request.num_computed == place and not preempted:
                    session.scheduler.preempt(request)
                    session.take_free_blocks(8)
                    preempted.append(request)

        session = Session(
            runners,
            block_size=BLOCK,
            num_blocks=1 + 8,
            copier=copier if is_swapped else None,
            copy_s=COPY_S["always"],
            disturb=disturb,
        )
        jobs = anew([alone])
        session.run(jobs)
        check(jobs, [alone])
        assert len(preempted) == 1
        assert session.num_loaded == (place // BLOCK * BLOCK if is_swapped else 0)
        assert session.num_recomputed == place - session.num_loaded


Action = tuple[str, int]


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    num_usable=st.integers(5, 8),
    num_slots=st.integers(1, 64),
    chunk=st.sampled_from([5, 16, 64]),
    actions=st.lists(
        st.tuples(st.sampled_from(["nothing", "nothing", "preempt", "take", "abort"]), st.integers(0, 20)),
        min_size=10,
        max_size=25,
    ),
)
def test_any_schedule_of_preemptions_and_aborts(
    runners: Runners, undisturbed: list[Job], num_usable: int, num_slots: int, chunk: int, actions: list[Action]
) -> None:
    """Between steps a request is preempted or aborted, or free blocks are taken; host memory of all sizes."""
    left = actions[::-1]
    aborted: set[str] = set()

    def disturb(session: Session) -> None:
        action, number = left.pop() if left else ("nothing", 0)
        running = session.scheduler.running
        if action == "take":
            session.take_free_blocks(number)
        elif running and action == "preempt":
            session.scheduler.preempt(running[number % len(running)])
        elif running and action == "abort" and len(aborted) < 2:
            name = running[number % len(running)].request_id
            session.engine.abort(SESSION, name, 1)
            aborted.add(name)

    copier = BlockCopier(runners.of(BLOCK).storage, num_slots)
    session = Session(
        runners,
        block_size=BLOCK,
        num_blocks=1 + num_usable,
        chunk=chunk,
        make_scheduler=bold,
        copier=copier,
        copy_s=COPY_S["always"],
        disturb=disturb,
    )
    chosen = undisturbed[::2]
    jobs = anew(chosen)
    session.run(jobs)
    copier.close()
    kept = [(job, want) for job, want in zip(jobs, chosen, strict=True) if job.name not in aborted]
    check(*map(list, zip(*kept, strict=True)))
    for job, want in zip(jobs, chosen, strict=True):
        assert job.token_ids == want.token_ids[: len(job.token_ids)]
        assert (job.finish_reason is FinishReason.CANCELLED) == (job.name in aborted)
    assert session.manager.host is not None
    assert not session.manager.host._claims
