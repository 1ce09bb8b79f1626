"""Whether a loaded model computes language at all: a cheap check that wrong weights or rotations fail."""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer

from common.types import Band, SamplingParams
from worker.engine.batch import Batch, BatchRow
from worker.engine.request import Request
from worker.model.loaded_model import TextParts
from worker.model.runner import ModelRunner

_TEXT = "The sun rises in the east and sets in the west. In the morning people wake up, eat breakfast and go to work."


def perplexity(runner: ModelRunner, text: TextParts) -> float:
    """The model's perplexity on two plain English sentences, computed one token at a time, in well under 100 steps.

    Below 50 for any working model; the vocabulary's size for one that knows nothing; in between, something is wrong:
    above the root of the vocabulary's size a warning is due. Uses the first blocks of the pool and its first slot: call
    it before they hold anything.
    """
    tokens = Tokenizer.from_buffer(text.tokenizer_json).encode(_TEXT, add_special_tokens=False).ids
    if text.add_bos_token and text.bos_token_id is not None:
        tokens = [text.bos_token_id, *tokens]
    blocks = list(range(-(-len(tokens) // runner.block_size) * len(runner.windows)))
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    request = Request("", 0, 0, tokens[:1], 1, sampling, Band.LOW, "", 0, block_ids=blocks, slot=0)
    surprise = 0.0
    for token in tokens[1:]:
        logits = runner.compute(Batch((BatchRow(request, 1),)))
        surprise -= float(torch.log_softmax(logits[0].double(), dim=-1)[token])
        request.num_computed += 1
        request.token_ids.append(token)
    return math.exp(surprise / (len(tokens) - 1))
