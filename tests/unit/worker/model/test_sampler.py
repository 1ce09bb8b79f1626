"""Every parameter against its definition, written out in float64 for one row."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.types import Band, SamplingParams
from worker.engine.executor import SamplingError
from worker.engine.request import Request
from worker.model.philox import uniform
from worker.model.sampler import Sampler

EOS = (2, 5)
TINY = 1e-5  # a case this near to a boundary is left out: float32 and float64 may differ there


def make_request(
    prompt: Sequence[int] = (1,), output: Sequence[int] = (), *, request_id: str = "r", seed: int = 0, **params: Any
) -> Request:
    sampling = SamplingParams(seed=seed, max_tokens=100, **params)
    return Request(request_id, 1, 0, [*prompt, *output], len(prompt), sampling, Band.HIGH, "", 0)


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: Tensor | list[float], request: Request, eos: Sequence[int] = ()) -> int:
    row = torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0)
    return Sampler(row.shape[1], eos).sample(row, [request])[0].token_id


def define_logits(logits: np.ndarray, request: Request, eos: Sequence[int]) -> np.ndarray:
    """What penalties, bias and minimum length make of the logits."""
    params, row = request.sampling, logits.astype(np.float64).copy()
    output = request.token_ids[request.num_prompt_tokens :]
    for token in set(request.token_ids):
        row[token] *= params.repetition_penalty if row[token] <= 0 else 1 / params.repetition_penalty
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias:
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            row[token] = -math.inf
    return row


def define_token(logits: np.ndarray, request: Request, eos: Sequence[int] = ()) -> int | None:
    """The token that the definition gives; None where float32 may decide otherwise."""
    params, row = request.sampling, define_logits(logits, request, eos)
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.temperature < 1e-5 or params.top_p == 0:
        return order[0]
    weights = np.exp((row - row.max()) / params.temperature)
    if params.top_k:
        order = order[: params.top_k]
    mass = np.cumsum([weights[token] for token in order]) / sum(weights[token] for token in order)
    if np.abs(mass[:-1] - params.top_p).min(initial=1.0) < TINY and params.top_p < 1:
        return None
    if params.top_p < 1:
        order = order[: 1 + int(np.argmax(mass >= params.top_p))]
    ratios = np.array([weights[token] for token in order])
    if np.abs(ratios - params.min_p).min() < TINY and 0 < params.min_p < 1:
        return None
    kept = sorted(token for token, ratio in zip(order, ratios, strict=True) if ratio >= params.min_p)
    cumulative = np.cumsum(weights[kept]) / weights[kept].sum()
    point = uniform(params.seed, len(request.token_ids))
    if np.abs(cumulative[:-1] - point).min(initial=1.0) < TINY:
        return None
    return kept[int(np.argmax(cumulative > point))]


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 20, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.1, 0.0]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.3]),
        "min_tokens": st.sampled_from([0, 0, 2, 4]),
        "stop_token_ids": st.sampled_from([(), (3,), (3, 7)]),
        "logit_bias": st.sampled_from([(), ((4, 3.0),), ((0, -100.0), (6, 1.5))]),
        "ignore_eos": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
    }
)
tokens = st.lists(st.integers(0, 9), max_size=6)


@settings(max_examples=250, deadline=None)
@given(
    params=parameters,
    prompt=tokens.filter(bool),
    output=tokens,
    vocab=st.sampled_from([10, 255, 256, 257, 1000]),
    seed=st.integers(0, 1000),
)
def test_any_parameters_follow_the_definition(
    params: dict[str, Any], prompt: list[int], output: list[int], vocab: int, seed: int
) -> None:
    logits = random_logits(1, vocab, seed)
    request = make_request(prompt, output, **params)
    expected = define_token(logits[0].numpy(), request, EOS)
    assume(expected is not None)
    assert sample_one(logits[0], request, EOS) == expected


def varied_requests() -> list[Request]:
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 0.7},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 1e-5},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"min_p": 0.1, "logprobs": 20},
        {"top_k": 10**9, "top_p": 1.0},
        {"temperature": 100.0, "top_k": 3, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.3},
        {"presence_penalty": -1.0, "logit_bias": ((7, 5.0), (8, -100.0))},
        {"min_tokens": 50, "stop_token_ids": (3, 4), "logprobs": 3},
        {"temperature": 0.0, "min_tokens": 50, "ignore_eos": True, "stop_token_ids": (1,)},
    ]
    return [
        make_request(
            range(index + 1), range(3, 20), request_id=f"r{index}", seed=index * 0x9E3779B97F4A7C15 % 2**64, **params
        )
        for index, params in enumerate(variants * 3)
    ]


@pytest.mark.parametrize("vocab", [1000, 1024, 49152])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        requests = varied_requests()
        logits = random_logits(len(requests), vocab, scale=3.0)
        logits[5, ::2] = -math.inf
        logits[20, 10:] = -math.inf
        kept = logits.clone()
        sampler = Sampler(vocab, EOS)
        together = sampler.sample(logits, requests)
        assert torch.equal(logits, kept), "logits are read only"
        assert sampler.sample(logits, requests) == together, "nothing but the arguments counts"
        assert sampler.sample(logits.flip(0), requests[::-1]) == together[::-1]
        alone = [
            Sampler(vocab, EOS).sample(logits[row : row + 1], [request])[0] for row, request in enumerate(requests)
        ]
        assert alone == together
    finally:
        torch.set_num_threads(before)


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(1, 50, scale=1.0).expand(4000, 50).contiguous()
    expected = torch.softmax(logits[0].double() / 0.9, dim=0) * 8000
    counts = torch.zeros(50, dtype=torch.float64)
    for by_seed in (True, False):  # many seeds at one position, and many positions of one seed
        requests = [
            make_request([1] * (1 if by_seed else 1 + index), seed=index if by_seed else 42, temperature=0.9)
            for index in range(4000)
        ]
        for sampled in Sampler(50).sample(logits, requests):
            counts[sampled.token_id] += 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 95, "49 degrees of freedom: beyond this with probability 1e-4"


def test_seed_and_position_alone_choose_the_token() -> None:
    logits = random_logits(1, 300)[0]
    first = [sample_one(logits, make_request([1] * length, seed=5)) for length in range(1, 60)]
    assert first == [sample_one(logits, make_request([9] * length, [], seed=5)) for length in range(1, 60)]
    split = [sample_one(logits, make_request([1], [1] * (length - 1), seed=5)) for length in range(1, 60)]
    assert first == split, "output of an earlier attempt counts as position, too"
    assert first != [sample_one(logits, make_request([1] * length, seed=6)) for length in range(1, 60)]
    assert len(set(first)) > 20


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9.9e-6, 1e-5, 1e-4])
def test_tiny_temperatures_take_the_greatest(temperature: float) -> None:
    logits = random_logits(1, 1000, scale=50.0)[0] + 500
    logits[700] = logits.max() + 0.01
    for seed in range(20):
        assert sample_one(logits, make_request(seed=seed, temperature=temperature)) == 700


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [300, 512])
def test_of_equal_logits_the_smaller_id_is_first(temperature: float, vocab: int) -> None:
    logits = torch.zeros(vocab)
    logits[[290, 7, 260]] = 3.0
    assert sample_one(logits, make_request(temperature=temperature, top_k=1)) == 7
    request = make_request(temperature=temperature, top_k=2, logprobs=2)
    result = Sampler(vocab).sample(logits.unsqueeze(0), [request])[0]
    assert result.token_id in (7, 260)
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs.top] == [7, 260]


def support(logits: list[float], **params: Any) -> set[int]:
    row = torch.tensor([logits] * 400)
    requests = [make_request(seed=seed, **params) for seed in range(400)]
    return {sampled.token_id for sampled in Sampler(len(logits)).sample(row, requests)}


def test_filters_keep_what_they_say() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert support(logits) == {0, 1, 2, 3}
    assert support(logits, top_k=2) == {1, 3}
    assert support(logits, top_k=4) == support(logits, top_k=99) == {0, 1, 2, 3}
    assert support(logits, top_p=0.41) == {1, 3}
    assert support(logits, top_p=0.39) == {1}
    assert support(logits, top_p=0.71) == {1, 2, 3}
    assert support(logits, top_p=1.0) == {0, 1, 2, 3}
    assert support(logits, top_p=0.0) == {1}
    assert support(logits, min_p=0.49) == {1, 2, 3}
    assert support(logits, min_p=0.51) == {1, 3}
    assert support(logits, min_p=1.0) == {1}
    assert support(logits, top_k=3, top_p=0.7) == {1, 3}, "top-p weighs what top-k left: 0.4 and 0.3 of 0.9"
    assert support(logits, top_k=3, top_p=0.5) == {1, 3}
    assert support(logits, top_k=3, top_p=0.44) == {1}
    assert support(logits, temperature=0.1, min_p=0.5) == {1}, "filters see the distribution after temperature"


def test_filters_on_a_flat_vocabulary() -> None:
    """Candidates by ratio and by block do not suffice here: nearly all tokens are needed."""
    flat = torch.zeros(1, 2048)
    requests = [make_request(seed=seed, top_p=0.999) for seed in range(300)]
    drawn = {sampled.token_id for sampled in Sampler(2048).sample(flat.expand(300, -1).contiguous(), requests)}
    assert max(drawn) < math.ceil(0.999 * 2048)
    assert len(drawn) > 200
    requests = [make_request(seed=seed, top_k=1500) for seed in range(300)]
    drawn = {sampled.token_id for sampled in Sampler(2048).sample(flat.expand(300, -1).contiguous(), requests)}
    assert 1300 < max(drawn) < 1500


def test_bias_forces_and_bans() -> None:
    logits = [0.0, 5.0, 1.0, 2.0]
    assert support(logits, logit_bias=((0, 100.0),)) == {0}
    assert support(logits, logit_bias=((1, -100.0),)) == {0, 2, 3}
    assert support(logits, temperature=0.0, logit_bias=((1, -100.0), (2, 1.5))) == {2}


def test_repetition_counts_prompt_and_output_and_the_others_output_only() -> None:
    logits = [3.0, 3.1, 2.9]
    assert sample_one(logits, make_request([1], temperature=0.0)) == 1
    assert sample_one(logits, make_request([1], temperature=0.0, repetition_penalty=1.2)) == 0
    assert sample_one(logits, make_request([2], [1], temperature=0.0, repetition_penalty=1.2)) == 0
    assert sample_one([-1.0, -1.1], make_request([0], temperature=0.0, repetition_penalty=1.2)) == 1
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert sample_one(logits, make_request([1], temperature=0.0, **{penalty: 0.5})) == 1
        assert sample_one(logits, make_request([2], [1], temperature=0.0, **{penalty: 0.5})) == 0
    repeated = make_request([2], [1, 1, 0], temperature=0.0, frequency_penalty=0.05)
    assert sample_one([3.0, 3.06, 0.0], repeated) == 1  # 3.06 - 2 * 0.05 is above 3 - 0.05
    repeated = make_request([2], [1, 1, 1, 0], temperature=0.0, frequency_penalty=0.05)
    assert sample_one([3.0, 3.06, 0.0], repeated) == 0
    once = make_request([2], [1, 1, 1, 0], temperature=0.0, presence_penalty=0.05)
    assert sample_one([3.0, 3.06, 0.0], once) == 1


def test_counts_follow_a_growing_and_a_preempted_request() -> None:
    vocab, logits = 40, random_logits(30, 40)
    params: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3}
    request, other = make_request([1, 2, 3], **params), make_request([4], **params)
    sampler = Sampler(vocab)
    for step in range(30):
        rows = [request, other] if step % 3 else [request]
        if step == 13:
            request.admissions += 1
            request.num_computed = 0
        if step in (14, 15):
            rows = [other]  # the request waits; its counts are forgotten
        batch = logits[step].expand(len(rows), vocab).contiguous()
        for row, sampled in zip(rows, sampler.sample(batch, rows), strict=True):
            fresh = dataclasses.replace(row, token_ids=list(row.token_ids))
            assert Sampler(vocab).sample(batch[:1], [fresh])[0] == sampled
            row.token_ids.append(sampled.token_id)


def test_another_request_in_the_place_of_a_dead_one_has_its_own_counts() -> None:
    logits, sampler = torch.tensor([[3.0, 3.1]]), Sampler(2)
    for prompt in ([1], [0], [1], [0]) * 5:
        request = make_request(prompt, temperature=0.0, repetition_penalty=2.0)
        assert sampler.sample(logits, [request])[0].token_id == 1 - prompt[0]
        del request


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_before_min_tokens(temperature: float) -> None:
    logits = [0.0, -1.0, 30.0, 25.0, 20.0, 29.0]  # 2 and 5 end a sequence, 3 and 4 are stop tokens
    for generated in range(5):
        request = make_request(
            [1, 1], [0] * generated, temperature=temperature, min_tokens=3, stop_token_ids=(3, 4), seed=1
        )
        assert (sample_one(logits, request, EOS) in (2, 5)) == (generated >= 3)
        ignoring = make_request([1, 1], [0] * generated, temperature=0.0, min_tokens=3, ignore_eos=True)
        assert sample_one(logits, ignoring, EOS) == 2, "an ignored end is an ordinary token"
        ignoring = make_request(
            [1, 1], [0] * generated, temperature=0.0, min_tokens=3, ignore_eos=True, stop_token_ids=(2,)
        )
        assert (sample_one(logits, ignoring, EOS) == 2) == (generated >= 3)


def test_logprobs_are_those_of_the_model() -> None:
    logits = random_logits(1, 600)
    raw = torch.log_softmax(logits[0].double(), dim=0)
    request = make_request(
        [int(raw.argmax())], temperature=0.2, repetition_penalty=2.0, logit_bias=((9, 100.0),), logprobs=7
    )
    result = Sampler(600).sample(logits, [request])[0]
    assert result.token_id == 9
    assert result.logprobs is not None
    assert result.logprobs.sampled.token_id == 9
    assert result.logprobs.sampled.logprob == pytest.approx(float(raw[9]), abs=1e-5)
    ids = [entry.token_id for entry in result.logprobs.top]
    assert ids == torch.sort(raw, descending=True).indices[:7].tolist()
    assert [entry.logprob for entry in result.logprobs.top] == pytest.approx(raw[ids].tolist(), abs=1e-5)
    greedy = Sampler(600).sample(logits, [make_request(temperature=0.0, logprobs=3)])[0]
    assert greedy.logprobs is not None
    assert len({entry.token_id for entry in greedy.logprobs.top}) == 3
    assert greedy.logprobs.top[0] == greedy.logprobs.sampled


@pytest.mark.parametrize("vocab", [8, 700])
def test_logprobs_count_and_absence(vocab: int) -> None:
    logits = torch.full((1, vocab), -math.inf)
    logits[0, :5] = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    sampler = Sampler(vocab)
    assert sampler.sample(logits, [make_request(temperature=0.0)])[0].logprobs is None
    none = sampler.sample(logits, [make_request(temperature=0.0, logprobs=0)])[0].logprobs
    assert none is not None
    assert none.top == ()
    many = sampler.sample(logits, [make_request(temperature=0.0, logprobs=20)])[0].logprobs
    assert many is not None
    assert [entry.token_id for entry in many.top] == [4, 3, 2, 1, 0], "impossible tokens are not listed"


@pytest.mark.parametrize("vocab", [100, 512])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unusable_logits_name_their_rows_only(poison: float, temperature: float, vocab: int) -> None:
    logits = random_logits(4, vocab)
    requests = [make_request(temperature=temperature, seed=seed, request_id=f"r{seed}") for seed in range(4)]
    sampler = Sampler(vocab)
    healthy = sampler.sample(logits, requests)
    broken = logits.clone()
    broken[1, 63] = poison
    broken[3] = -math.inf
    with pytest.raises(SamplingError) as caught:
        sampler.sample(broken, requests)
    assert sorted(caught.value.messages) == [1, 3]
    assert sampler.sample(broken[[0, 2]], [requests[0], requests[2]]) == [healthy[0], healthy[2]]


def test_everything_masked_is_an_error_of_that_row() -> None:
    request = make_request(temperature=0.0, min_tokens=1, stop_token_ids=(0, 1))
    with pytest.raises(SamplingError):
        sample_one([0.0, 1.0], request)


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits are \(1, 9\), expected \(1, 10\)"):
        Sampler(10).sample(torch.zeros(1, 9), [make_request()])
