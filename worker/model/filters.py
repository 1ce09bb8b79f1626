"""Which tokens rank first, and which ones top-k, top-p and min-p leave; without sorting a vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.types import SamplingParams

_BLOCK = 256
_CANDIDATE_RATIOS = (
    1e-3,
    1e-6,
    0.0,
)  # of the greatest probability: where to cut before sorting, if in vain, further down

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def ranked(values: Floats, count: int, least: float) -> Ids:
    """Ids of the `count` greatest values above `least`, greatest first; of equal values the smaller id is first.

    Args:
        values: [n].
        count: at least 1; fewer ids are returned where there are fewer.
        least: a value that does not count, nor any below it.
    """
    blocks = values[: len(values) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    if count < len(blocks):
        # So many blocks have a maximum from this one on, hence no value below it is among the greatest.
        bound = np.partition(blocks.max(axis=1), -count)[-count]
        ids = np.flatnonzero((values >= bound) & (values > least))
    else:
        ids = np.flatnonzero(values > least)
    return _by_rank(values, ids)[:count]


def kept_tokens(probs: Floats, params: SamplingParams) -> Ids | None:
    """Ids that top-k, then top-p, then min-p leave, ascending; None if they leave every token.

    Top-p weighs what top-k has left. Tokens of probability 0 may be missing: nothing draws them.

    Args:
        probs: [vocab], after temperature; their sum is 1.
        params: `top_k` is not 1 and `top_p` not 0, for these are greedy.
    """
    top_k = params.top_k if params.top_k < len(probs) else 0
    if not top_k and params.top_p >= 1.0:
        return np.flatnonzero(probs >= params.min_p * probs.max()) if params.min_p > 0.0 else None
    if top_k:
        ids = ranked(probs, top_k, 0.0)
        if params.top_p < 1.0:
            ids = ids[: _nucleus_size(probs[ids], params.top_p * float(probs[ids].sum(dtype=np.float64)))]
    else:
        ids = _nucleus(probs, params.top_p)
    if params.min_p > 0.0:
        ids = ids[probs[ids] >= params.min_p * probs[ids[0]]]
    return np.sort(ids)


def _nucleus(probs: Floats, top_p: float) -> Ids:
    """The smallest set of most probable tokens with total probability `top_p`, most probable first."""
    greatest = probs.max()
    for ratio in _CANDIDATE_RATIOS:
        ids = np.flatnonzero(probs >= ratio * greatest if ratio else probs > 0.0)
        if not ratio or probs[ids].sum(dtype=np.float64) >= top_p:
            break
    ids = _by_rank(probs, ids)
    return ids[: _nucleus_size(probs[ids], top_p)]


def _nucleus_size(ordered: Floats, mass: float) -> int:
    """How many values it takes, from the first on, until their sum is at least `mass`."""
    return 1 + int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), mass))


def _by_rank(values: Floats, ids: Ids) -> Ids:
    return ids[np.argsort(-values[ids], kind="stable")]
