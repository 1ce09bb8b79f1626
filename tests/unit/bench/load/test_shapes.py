"""Workloads have the stated shares and lengths; prompts share what they should and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bench.load.shapes import (
    DOCUMENT_SHARE,
    NUM_DOCUMENTS,
    WORKLOADS,
    Caps,
    Shape,
    TokenSource,
    fit,
    from_trace,
    mixed,
    prefix,
)
from bench.traces import Trace, TraceRow

VOCAB = 49_152


def test_the_mix_has_the_stated_shares_and_total_lengths() -> None:
    shapes = mixed(5000, seed=1, scale=1.0)
    counts = Counter(shape.kind for shape in shapes)
    assert counts["dialogue"] / 5000 == pytest.approx(0.60, abs=0.02)
    assert counts["retrieval"] / 5000 == pytest.approx(0.25, abs=0.02)
    assert counts["long writing"] / 5000 == pytest.approx(0.15, abs=0.02)
    bounds = {"dialogue": (100, 500), "retrieval": (1000, 4000), "long writing": (2000, 8000)}
    for shape in shapes:
        low, high = bounds[shape.kind]
        assert low <= shape.num_prompt + shape.num_output <= high


def test_retrieval_prompts_begin_with_one_of_few_documents() -> None:
    retrieval = [shape for shape in mixed(2000, seed=1, scale=1.0) if shape.kind == "retrieval"]
    assert len({shape.prefixes[0][0] for shape in retrieval}) == NUM_DOCUMENTS
    assert all(shape.prefixes[0][1] == int(shape.num_prompt * DOCUMENT_SHARE) for shape in retrieval)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_repeats_and_more_requests_begin_alike(name: str) -> None:
    draw = WORKLOADS[name]
    assert draw(30, seed=4, scale=0.5) == draw(60, seed=4, scale=0.5)[:30]
    assert all(shape.num_prompt >= 1 and shape.num_output >= 1 for shape in draw(50, seed=4, scale=0.0001))


def test_scale_multiplies_all_lengths() -> None:
    for large, small in zip(mixed(50, seed=2, scale=1.0), mixed(50, seed=2, scale=0.1), strict=True):
        assert small.num_prompt == large.num_prompt // 10
        assert small.num_output == large.num_output // 10


def test_prompts_of_one_prefix_share_exactly_it() -> None:
    source = TokenSource("a", VOCAB)
    shapes = prefix(40, seed=0, scale=0.1)
    prompts: dict[str, list[tuple[int, ...]]] = {}
    for shape in shapes:
        prompt = source.prompt(shape)
        assert len(prompt) == shape.num_prompt
        prompts.setdefault(shape.prefixes[0][0], []).append(prompt)
    shared = shapes[0].prefixes[0][1]
    for group in prompts.values():
        assert len({prompt[:shared] for prompt in group}) == 1
        assert len({prompt[shared:] for prompt in group}) == len(group)
    assert len({group[0][:shared] for group in prompts.values()}) == len(prompts)


def test_a_longer_piece_begins_with_the_shorter_whatever_came_first() -> None:
    short, long = Shape("k", 5, 1, (("d", 5),)), Shape("k", 9, 1, (("d", 9),))
    one, other = TokenSource("a", VOCAB), TokenSource("a", VOCAB)
    first = [one.prompt(short), one.prompt(long)]
    second = [other.prompt(long), other.prompt(short)]
    assert first[1][:5] == first[0]
    assert first == second[::-1]


def test_another_salt_shares_nothing() -> None:
    shape = Shape("k", 40, 1, (("d", 40),))
    assert TokenSource("a", VOCAB).prompt(shape) != TokenSource("b", VOCAB).prompt(shape)


def test_tokens_are_inside_a_small_vocabulary() -> None:
    assert max(TokenSource("a", 128).prompt(Shape("k", 500, 1))) < 128
    with pytest.raises(ValueError, match="a vocabulary of 90 tokens"):
        TokenSource("a", 90)


def test_a_trace_keeps_clients_arrivals_and_blocks() -> None:
    row = TraceRow(1000, 20, arrival_s=1.5, client="c", blocks=(4, 9))
    (shape,) = from_trace(Trace(Path("t.csv"), (row,), 1, 0, 0, 0.0), scale=0.5)
    assert shape == Shape("t", 500, 10, (("block 4", 256), ("block 9", 256)), "c", 1.5)
    assert len(TokenSource("a", VOCAB).prompt(shape)) == 500


def test_too_long_requests_are_clipped_or_dropped_and_counted() -> None:
    shapes = [Shape("k", 50, 50), Shape("k", 300, 40), Shape("k", 10, 300), Shape("k", 500, 500)]
    clipped = fit(shapes, Caps(context_length=200))
    assert [(shape.num_prompt, shape.num_output) for shape in clipped.shapes] == [
        (50, 50),
        (160, 40),
        (10, 190),
        (100, 100),
    ]
    assert (clipped.num_clipped, clipped.num_dropped) == (3, 0)
    dropped = fit(shapes, Caps(context_length=200, is_dropping=True))
    assert dropped.shapes == (shapes[0],)
    assert dropped.num_dropped == 3


def test_the_users_own_caps() -> None:
    fitted = fit([Shape("k", 50, 60)], Caps(context_length=8192, max_prompt=20, max_output=30))
    assert (fitted.shapes[0].num_prompt, fitted.shapes[0].num_output) == (20, 30)
