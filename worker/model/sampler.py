"""The next token of each row: a function of the row's logits, seed, position and own tokens, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import GREEDY_TEMPERATURE, PositionLogprobs, SamplingParams, TokenLogprob
from worker.engine.batch import SampledToken
from worker.engine.executor import SamplingError
from worker.engine.request import Request
from worker.model.filters import Floats, kept_tokens, ranked
from worker.model.penalties import LogitEditor
from worker.model.philox import uniform

_BLOCK = 256  # weights are summed in blocks, so that a draw scans one block and the block sums


class Sampler:
    """Samples rows of any mixture of parameters.

    Order of effects: repetition penalty, frequency and presence penalty, logit bias, minimum length (all end and stop
    tokens are masked; end tokens are left alone if ignored), temperature, top-k, top-p, min-p, draw. Log probabilities
    are those of the untouched logits.

    The draw inverts the cumulative distribution of the kept tokens in order of their ids, at the number that Philox
    gives for (seed, position of the new token). Of equal logits the smaller id ranks first, everywhere. No value of a
    row depends on another row, bit for bit.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """`vocab_size` is the length of a row; `eos_token_ids` are masked while a minimum length is not met."""
        self._vocab_size = vocab_size
        self._editor = LogitEditor(eos_token_ids)
        self._scaled = torch.empty(0, -(-vocab_size // _BLOCK) * _BLOCK)  # float32 [rows, vocab padded to blocks]
        self._probs = torch.empty_like(self._scaled)

    @torch.inference_mode()
    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """The next token of each request.

        Args:
            logits: float32 [n, vocab_size], contiguous rows; read only.
            requests: one for each row, none twice; read only.

        Raises:
            SamplingError: the logits of some rows are NaN, infinite or all masked; its rows are indices of `requests`.
        """
        if logits.shape != (len(requests), self._vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}, expected {(len(requests), self._vocab_size)}")
        edited = [row for row, request in enumerate(requests) if self._editor.edits(request)]
        drawn = [row for row, request in enumerate(requests) if not is_greedy(request.sampling)]
        best, best_ids = _first_maximum(logits)
        work: dict[int, Tensor] = {}
        for row in edited:
            work[row] = logits[row].clone()
            self._editor.apply(work[row], requests[row])
            top, top_id = _first_maximum(work[row].unsqueeze(0))
            best[row], best_ids[row] = top[0], top_id[0]
        self._editor.keep_only(requests)
        if bad := torch.nonzero(~torch.isfinite(best)).squeeze(1).tolist():
            raise SamplingError({row: f"its greatest logit is {float(best[row])}" for row in bad})
        token_ids: list[int] = best_ids.tolist()
        if drawn:
            self._draw(logits, requests, drawn, best, work, token_ids)
        logprobs = _raw_logprobs(logits, requests, token_ids)
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(token_ids)]

    def _draw(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        rows: list[int],
        best: Tensor,
        work: dict[int, Tensor],
        token_ids: list[int],
    ) -> None:
        """Replaces the entries of `token_ids` for `rows`; `work` has the logits of edited rows, `best` all maxima."""
        if len(rows) > len(self._scaled):
            self._scaled = torch.full((len(rows), self._scaled.shape[1]), -torch.inf)
            self._probs = torch.empty_like(self._scaled)
        scaled = self._scaled[: len(rows)]
        for index, row in enumerate(rows):
            source = work[row] if row in work else logits[row]
            torch.sub(source, best[row], out=scaled[index, : self._vocab_size])
        inverse = torch.tensor([1.0 / requests[row].sampling.temperature for row in rows])
        scaled.mul_(inverse.unsqueeze(1))
        probs = torch.softmax(scaled, dim=-1, out=self._probs[: len(rows)])
        points = [uniform(requests[row].sampling.seed, requests[row].num_tokens) for row in rows]
        sums = torch.cumsum(probs.view(len(rows), -1, _BLOCK).sum(dim=-1), dim=-1, dtype=torch.float64).numpy()
        weights = probs.numpy()
        for index, row in enumerate(rows):
            kept = kept_tokens(weights[index, : self._vocab_size], requests[row].sampling)
            if kept is None:
                token_ids[row] = _invert_blocks(weights[index], sums[index], points[index])
            else:
                token_ids[row] = int(kept[_invert(weights[index, kept], points[index])])


def is_greedy(params: SamplingParams) -> bool:
    """Whether the most probable token is taken: no temperature, or filters that leave only that one."""
    return params.temperature < GREEDY_TEMPERATURE or params.top_p == 0.0 or params.top_k == 1


def _first_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest value of each row, float32 [n], and the first place of it, int64 [n]; NaN counts as greatest."""
    rows, width = logits.shape
    if width % _BLOCK:
        ids = logits.argmax(dim=-1)
    else:  # maxima of blocks are vectorised, argmax is not
        blocks = logits.view(rows, -1, _BLOCK)
        block = blocks.amax(dim=-1).argmax(dim=-1)
        ids = block * _BLOCK + blocks[torch.arange(rows), block].argmax(dim=-1)
    return logits.gather(1, ids.unsqueeze(1)).squeeze(1), ids


def _invert(weights: Floats, point: float) -> int:
    """Index of the first weight at which the running sum exceeds `point` of the total; weights are [m], one is > 0."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))


def _invert_blocks(weights: Floats, sums: NDArray[np.float64], point: float) -> int:
    """As `_invert` over a whole row, [blocks * _BLOCK]; `sums` are the running sums of its blocks, [blocks]."""
    target = point * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    start = block * _BLOCK
    inside = weights[start : start + _BLOCK]
    before = sums[block - 1] if block else 0.0
    index = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, side="right"))
    if index == _BLOCK:  # the block's float32 sum was rounded up past the sum of its weights
        index = int(np.flatnonzero(inside)[-1])
    return start + index


def _raw_logprobs(logits: Tensor, requests: Sequence[Request], token_ids: Sequence[int]) -> dict[int, PositionLogprobs]:
    """Log probabilities by row, for the rows that ask for them, from the logits as the model gave them."""
    rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    if not rows:
        return {}
    result = {}
    for row in rows:
        raw = torch.log_softmax(logits[row : row + 1], dim=-1)[0]
        sampled = TokenLogprob(token_ids[row], float(raw[token_ids[row]]))
        result[row] = PositionLogprobs(sampled, _top_logprobs(raw, requests[row].sampling.logprobs or 0))
    return result


def _top_logprobs(raw: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` most probable possible tokens of `raw`, float32 [vocab], each once, most probable first."""
    if count == 0:
        return ()
    values = raw.numpy()
    return tuple(TokenLogprob(int(token), float(values[token])) for token in ranked(values, count, -np.inf))
