"""The next token of each row: a function of the row's logits, seed, position and own tokens, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.types import GREEDY_TEMPERATURE, PositionLogprobs, SamplingParams, TokenLogprob
from worker.engine.batch import SampledToken
from worker.engine.executor import SamplingError
from worker.engine.request import Request
from worker.model.penalties import LogitEditor
from worker.model.philox import uniform

_BLOCK = 256  # weights are summed in blocks, so that a draw scans one block and the block sums
_CANDIDATE_RATIOS = (1e-3, 1e-6, 0.0)  # of the greatest probability: where to cut before sorting


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
        padded = -(-self._vocab_size // _BLOCK) * _BLOCK
        scaled = torch.full((len(rows), padded), -torch.inf)
        for index, row in enumerate(rows):
            source = work[row] if row in work else logits[row]
            torch.sub(source, best[row], out=scaled[index, : self._vocab_size])
        inverse = torch.tensor([1.0 / requests[row].sampling.temperature for row in rows])
        probs = torch.softmax(scaled.mul_(inverse.unsqueeze(1)), dim=-1)
        points = [uniform(requests[row].sampling.seed, requests[row].num_tokens) for row in rows]
        whole = []
        for index, row in enumerate(rows):
            kept = _kept_tokens(probs[index], requests[row].sampling, self._vocab_size)
            if kept is None:
                whole.append(index)
            else:
                token_ids[row] = int(kept[_invert(probs[index, kept], points[index])])
        if whole:
            block_sums = probs.view(len(rows), -1, _BLOCK).sum(dim=-1)
            cumulative = torch.cumsum(block_sums, dim=-1, dtype=torch.float64)
        for index in whole:
            token_ids[rows[index]] = _invert_blocks(probs[index], cumulative[index], points[index])


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


def _kept_tokens(probs: Tensor, params: SamplingParams, vocab_size: int) -> Tensor | None:
    """Ids that top-k, then top-p, then min-p leave, int64 [m] ascending; None if they leave every token.

    Args:
        probs: float32 [>= vocab_size], after temperature; ids beyond the vocabulary have probability 0.
    """
    top_k = params.top_k if params.top_k < vocab_size else 0
    if not top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        return None
    greatest = probs.amax()
    if not top_k and params.top_p >= 1.0:
        return torch.nonzero(probs >= params.min_p * greatest).squeeze(1)
    probs = probs[:vocab_size]
    for ratio in _CANDIDATE_RATIOS:
        ids = torch.nonzero(probs >= ratio * greatest if ratio else probs > 0).squeeze(1)
        if len(ids) < top_k and ratio:
            continue
        values, order = torch.sort(probs[ids], descending=True, stable=True)
        if top_k:
            values, order = values[:top_k], order[:top_k]
            total = float(values.sum(dtype=torch.float64))
        else:
            total = 1.0
        if params.top_p >= 1.0:
            break
        reached = torch.cumsum(values, dim=0, dtype=torch.float64)
        if ratio == 0.0 or float(reached[-1]) >= params.top_p * total:
            # Tokens are needed until the sum is reached: the first one always, the last one to reach it included.
            needed = 1 + int(torch.searchsorted(reached, params.top_p * total))
            values, order = values[:needed], order[:needed]
            break
    if params.min_p > 0.0:
        order = order[values >= params.min_p * greatest]
    return torch.sort(ids[order]).values


def _invert(weights: Tensor, point: float) -> int:
    """Index of the first weight at which the running sum exceeds `point` of the total; weights are float32 [m] > 0."""
    cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
    return int(torch.searchsorted(cumulative, point * cumulative[-1], right=True))


def _invert_blocks(probs: Tensor, cumulative: Tensor, point: float) -> int:
    """As `_invert` over a whole row, float32 [blocks * _BLOCK]; `cumulative` sums its blocks, float64 [blocks]."""
    target = point * cumulative[-1]
    block = int(torch.searchsorted(cumulative, target, right=True))
    weights = probs[block * _BLOCK : (block + 1) * _BLOCK]
    before = cumulative[block - 1] if block else 0.0
    index = int(torch.searchsorted(torch.cumsum(weights, dim=0, dtype=torch.float64), target - before, right=True))
    if index == _BLOCK:  # the block's float32 sum was rounded up past the sum of its weights
        index = int(torch.nonzero(weights)[-1])
    return block * _BLOCK + index


def _raw_logprobs(logits: Tensor, requests: Sequence[Request], token_ids: Sequence[int]) -> dict[int, PositionLogprobs]:
    """Log probabilities by row, for the rows that ask for them, from the logits as the model gave them."""
    rows = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
    if not rows:
        return {}
    raw = torch.log_softmax(logits[torch.tensor(rows)], dim=-1)
    result = {}
    for index, row in enumerate(rows):
        sampled = TokenLogprob(token_ids[row], float(raw[index, token_ids[row]]))
        result[row] = PositionLogprobs(sampled, _top_logprobs(raw[index], requests[row].sampling.logprobs or 0))
    return result


def _top_logprobs(raw: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` most probable possible tokens of `raw`, float32 [vocab], each once, most probable first."""
    if count == 0:
        return ()
    least = torch.topk(raw, min(count, len(raw))).values[-1]
    ids = torch.nonzero((raw >= least) & (raw > -torch.inf)).squeeze(1)
    values, order = torch.sort(raw[ids], descending=True, stable=True)
    pairs = zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True)
    return tuple(TokenLogprob(token, value) for token, value in pairs)
