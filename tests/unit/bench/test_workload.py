"""The workloads are reproducible, have the stated mix, and keep their numbers over time."""

import hashlib
from collections import Counter

import pytest

from bench.workload import FIRST_TOKEN_ID, LAST_TOKEN_ID, MIX, Work, decode_only, mixed

PUBLISHED_SUMS = (26_094, 8_909)  # prompt tokens, output tokens of mixed(64)
PUBLISHED_DIGEST = "1d2593021793a35b"


def digest(work: list[Work]) -> str:
    return hashlib.sha256(repr([(request.prompt, request.num_output) for request in work]).encode()).hexdigest()[:16]


def kind_of(request: Work) -> str:
    fits = [
        kind.name
        for kind in MIX
        if kind.prompt[0] <= len(request.prompt) <= kind.prompt[1]
        and kind.output[0] <= request.num_output <= kind.output[1]
    ]
    assert len(fits) == 1, f"{len(request.prompt)} + {request.num_output} tokens fit {fits}"
    return fits[0]


def test_the_same_seed_gives_the_same_work_and_another_seed_other_work():
    assert mixed(20, seed=3) == mixed(20, seed=3)
    assert mixed(20, seed=3) != mixed(20, seed=4)


def test_a_longer_workload_starts_with_the_shorter_one():
    assert mixed(30)[:10] == mixed(10)


def test_the_published_workload_keeps_its_tokens():
    """Figures of different days are comparable only while this holds."""
    work = mixed(64)
    assert (sum(len(request.prompt) for request in work), sum(request.num_output for request in work)) == PUBLISHED_SUMS
    assert digest(work) == PUBLISHED_DIGEST


def test_every_request_has_a_kind_and_kinds_have_their_shares():
    counts = Counter(kind_of(request) for request in mixed(2000, seed=1))
    assert counts["dialogue"] / 2000 == pytest.approx(0.60, abs=0.04)
    assert counts["retrieval"] / 2000 == pytest.approx(0.25, abs=0.04)
    assert counts["long writing"] / 2000 == pytest.approx(0.15, abs=0.04)


def test_tokens_stay_in_their_range():
    tokens = [token for request in mixed(50) for token in request.prompt]
    assert min(tokens) >= FIRST_TOKEN_ID
    assert max(tokens) <= LAST_TOKEN_ID


def test_scale_shortens_but_never_to_nothing():
    for request, short in zip(mixed(50), mixed(50, scale=0.001), strict=False):
        assert 1 <= len(short.prompt) <= len(request.prompt)
        assert 1 <= short.num_output <= request.num_output


def test_decode_only_prompts_share_no_prefix():
    work = decode_only(32)
    assert len({request.prompt[0] for request in work}) == 32
    assert {(len(request.prompt), request.num_output) for request in work} == {(32, 128)}


@pytest.mark.parametrize("num_requests", [0, 1])
def test_small_workloads(num_requests: int):
    assert len(mixed(num_requests)) == len(decode_only(num_requests)) == num_requests
