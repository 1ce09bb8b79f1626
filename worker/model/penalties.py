"""Which tokens a request has used, and what its parameters change in the logits because of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.engine.request import Request


class TokenCounts:
    """The distinct tokens of one request and how often each is in its output, kept up as its token list grows."""

    def __init__(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        distinct = list(dict.fromkeys(prompt))
        self._num_seen = len(prompt)
        self._index = {token: index for index, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self.request = request

    def update(self) -> tuple[Tensor, Tensor]:
        """Counts the tokens that are new since the last call.

        Returns:
            The distinct token ids of prompt and output, int64 [m], and their occurrences in the output, float32 [m].
            Views that stay right until the next call.
        """
        new = self.request.token_ids[self._num_seen :]
        self._num_seen += len(new)
        for token in new:
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                room = max(64, index)
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[index] = token
            self._counts[index] += 1
        used = len(self._index)
        return torch.from_numpy(self._ids[:used]), torch.from_numpy(self._counts[:used])


class LogitEditor:
    """Applies penalties, logit bias and the minimum length to logits.

    Counts are kept from call to call for the requests of the last call only. They derive from the token list alone,
    so that a request which was preempted, or has come from another worker, has the same ones.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._counts: dict[int, TokenCounts] = {}

    def edits(self, request: Request) -> bool:
        """Whether the request's parameters change any logit now."""
        params = request.sampling
        return _penalizes(request) or bool(params.logit_bias) or bool(self._banned(request))

    def apply(self, row: Tensor, request: Request) -> None:
        """Changes `row`, float32 [vocab], in place: penalties, then bias, then no end before `min_tokens`."""
        params = request.sampling
        if _penalizes(request):
            ids, counts = self._counts_of(request).update()
            values = row[ids]
            values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            values -= params.frequency_penalty * counts
            values -= params.presence_penalty * (counts > 0)
            row[ids] = values
        if params.logit_bias:
            ids = torch.tensor([token for token, _ in params.logit_bias])
            row.index_add_(0, ids, torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32))
        if banned := self._banned(request):
            row[torch.tensor(banned)] = -math.inf

    def keep_only(self, requests: Sequence[Request]) -> None:
        """Forgets the counts of every other request."""
        if self._counts:
            live = {id(request) for request in requests}
            self._counts = {key: counts for key, counts in self._counts.items() if key in live}

    def _counts_of(self, request: Request) -> TokenCounts:
        counts = self._counts.get(id(request))
        if counts is None or counts.request is not request:
            counts = self._counts[id(request)] = TokenCounts(request)
        return counts

    def _banned(self, request: Request) -> tuple[int, ...]:
        params = request.sampling
        if request.num_output_tokens >= params.min_tokens:
            return ()
        return params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_token_ids)


def _penalizes(request: Request) -> bool:
    params = request.sampling
    return (
        params.repetition_penalty != 1.0
        or ((params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and request.num_output_tokens > 0)
    )  # fmt: skip
