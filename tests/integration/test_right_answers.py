"""The real model's output is that of `transformers`, token for token, whatever else the engine is doing meanwhile.

Greedy decoding in float32 over the same weights. Two right programs may differ only where the two best logits are
closer than what float32 rounding makes of them; none of the twenty prompts has such a place (their closest decision
is asserted below), so that no mismatch is ever excused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer

from bench.in_process import EngineOptions
from common.default_model import ensure_default_model
from common.types import SamplingParams
from tests.support.prompts import Prompt, real_prompts
from tests.support.real_model import (
    Expected,
    Job,
    PreemptingScheduler,
    Runners,
    Session,
    drawn_clock,
    greedy_reference,
)
from worker.engine.scheduler import Scheduler
from worker.model.loaded_model import LoadedModel
from worker.model.weights import load_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LEAST_MARGIN = 1e-3  # logits; rounding moves them by about 1e-4


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(ensure_default_model(), torch.float32)


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[Prompt]:
    return real_prompts(Tokenizer.from_str(model.text.tokenizer_json.decode()))


@pytest.fixture(scope="module")
def expected(model: LoadedModel, prompts: list[Prompt]) -> dict[str, Expected]:
    return greedy_reference(model, prompts)


@pytest.fixture(scope="module")
def runners(model: LoadedModel) -> Runners:
    return Runners(model, EngineOptions(dtype=torch.float32, kv_cache_mib=600))


def greedy(prompt: Prompt, *, suffix: str = "", arrival_step: int = 0) -> Job:
    sampling = SamplingParams(seed=0, max_tokens=prompt.num_output, temperature=0.0, ignore_eos=True)
    return Job(prompt.name + suffix, prompt.token_ids, sampling, arrival_step)


def sampled(prompt: Prompt, index: int, *, arrival_step: int = 0) -> Job:
    """Several kinds of sampling, each with penalties or filters of its own, by the prompt's index."""
    kinds = (
        SamplingParams(seed=index, max_tokens=16, temperature=0.8, ignore_eos=True),
        SamplingParams(seed=2**63 + index, max_tokens=16, temperature=1.0, top_p=0.9, top_k=50, ignore_eos=True),
        SamplingParams(
            seed=index,
            max_tokens=16,
            temperature=1.2,
            min_p=0.05,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.3,
            ignore_eos=True,
        ),
    )
    return Job(prompt.name, prompt.token_ids, kinds[index % len(kinds)], arrival_step)


def passers_by(rng: random.Random, count: int, arrivals: int) -> list[Job]:
    """Other requests that come and go between steps, half of them aborted before their end."""
    jobs = []
    for index in range(count):
        prompt = [rng.randrange(100, 40_000) for _ in range(rng.randint(1, 120))]
        num_output = rng.randint(10, 60)
        sampling = SamplingParams(seed=index, max_tokens=num_output, temperature=0.7, ignore_eos=True)
        abort_after = rng.randint(1, num_output) if rng.random() < 0.5 else None
        jobs.append(Job(f"passer-by {index}", prompt, sampling, rng.randrange(arrivals), abort_after))
    return jobs


def check(jobs: Sequence[Job], expected: dict[str, Expected]) -> None:
    """Fails with every prompt that differs, and where."""
    wrong = {}
    for job in jobs:
        reference = expected[job.name.partition("/")[0]].token_ids
        if job.token_ids != reference:
            pairs = zip(job.token_ids, reference, strict=False)
            first = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), "length")
            wrong[job.name] = f"first difference at output {first} of {len(reference)}"
    assert not wrong


def test_the_prompts_are_varied_and_leave_no_decision_to_rounding(
    prompts: list[Prompt], expected: dict[str, Expected]
) -> None:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert len({prompt.name for prompt in prompts}) == 20
    assert (min(lengths), max(lengths)) == (5, 1500)
    assert all(32 <= len(reference.token_ids) <= 64 for reference in expected.values())
    assert min(reference.least_margin for reference in expected.values()) > LEAST_MARGIN


def test_alone(runners: Runners, prompts: list[Prompt], expected: dict[str, Expected]) -> None:
    session = Session(runners, block_size=16, prefix_cache=False)
    jobs = [greedy(prompt) for prompt in prompts]
    for job in jobs:
        session.run([job])
    assert session.peak_running == 1
    check(jobs, expected)


@pytest.mark.parametrize(("block_size", "chunk", "seed"), [(8, 64, 0), (64, 512, 1)])
def test_in_a_batch_of_32_with_others_joining_and_leaving(
    runners: Runners, prompts: list[Prompt], expected: dict[str, Expected], block_size: int, chunk: int, seed: int
) -> None:
    """Steps are bounded in time as well, by a clock that runs unevenly."""
    rng = random.Random(seed)
    clock = drawn_clock(rng)
    session = Session(runners, block_size=block_size, chunk=chunk, max_num_seqs=32, prefix_cache=False, now=clock)
    jobs = [greedy(prompt, arrival_step=rng.randrange(40)) for prompt in prompts]
    session.run(jobs + passers_by(rng, count=40, arrivals=60))
    assert session.peak_running == 32
    check(jobs, expected)


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 512), (64, 16), (8, 64)])
def test_with_a_cold_and_then_a_warm_prefix_cache(
    runners: Runners, prompts: list[Prompt], expected: dict[str, Expected], block_size: int, chunk: int
) -> None:
    session = Session(runners, block_size=block_size, chunk=chunk)
    cold = [greedy(prompt) for prompt in prompts]
    warm = [greedy(prompt, suffix="/again") for prompt in prompts]
    session.run(cold)
    session.run(warm)
    for job in warm:
        assert job.num_cached == (len(job.prompt) - 1) // block_size * block_size
    check(cold + warm, expected)


@pytest.mark.parametrize(
    ("block_size", "chunk", "prefix_cache", "seed"),
    [(16, 64, False, 0), (64, 512, True, 1), (8, 16, True, 2)],
)
def test_preempted_at_random_steps(
    runners: Runners,
    prompts: list[Prompt],
    expected: dict[str, Expected],
    block_size: int,
    chunk: int,
    prefix_cache: bool,
    seed: int,
) -> None:
    session = Session(
        runners,
        block_size=block_size,
        chunk=chunk,
        prefix_cache=prefix_cache,
        make_scheduler=partial(
            PreemptingScheduler, rng=random.Random(seed), probability=0.03 if prefix_cache else 0.015
        ),
    )
    jobs = [greedy(prompt) for prompt in prompts]
    session.run(jobs)
    assert session.num_preemptions >= len(prompts) / 2
    assert session.num_recomputed > 0
    check(jobs, expected)


def test_preempted_because_blocks_run_out(
    runners: Runners, prompts: list[Prompt], expected: dict[str, Expected]
) -> None:
    """The pool holds twice the longest request, half of what all need, and admission expects that nobody will grow."""
    largest = max(len(prompt.token_ids) + prompt.num_output for prompt in prompts)
    session = Session(
        runners,
        block_size=16,
        num_blocks=1 + 2 * largest // 16,
        make_scheduler=lambda manager, config: Scheduler(manager, replace(config, optimism=1.0, output_share=0.0)),
    )
    jobs = [greedy(prompt) for prompt in prompts]
    session.run(jobs)
    assert session.num_preemptions > 0
    check(jobs, expected)


def test_sampled_output_is_that_of_the_request_alone(runners: Runners, prompts: list[Prompt]) -> None:
    """In a batch, in chunks, after a prefix hit, and preempted: the same seed gives the same tokens."""
    chosen = [prompt for prompt in prompts if len(prompt.token_ids) <= 120]
    alone = [sampled(prompt, index) for index, prompt in enumerate(chosen)]
    for job in alone:
        Session(runners, prefix_cache=False).run([job])
    rng = random.Random(5)
    preempting = partial(PreemptingScheduler, rng=rng, probability=0.05)
    crowded = Session(runners, chunk=16, max_num_seqs=32)
    disturbed = Session(runners, block_size=8, chunk=64, make_scheduler=preempting)
    for session in (crowded, crowded, disturbed):
        jobs = [sampled(prompt, index, arrival_step=rng.randrange(10)) for index, prompt in enumerate(chosen)]
        session.run(jobs + passers_by(rng, count=12, arrivals=20))
        assert [job.token_ids for job in jobs] == [job.token_ids for job in alone]
    assert disturbed.num_preemptions > 0
