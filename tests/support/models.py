"""Small random models as `transformers` saves them, our runner over them, and the real model's path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from common.default_model import DefaultModelError, ensure_default_model
from common.types import Band, SamplingParams
from worker.engine.batch import Batch, BatchRow
from worker.engine.request import Request
from worker.kernels import load_backend
from worker.model.loaded_model import LoadedModel
from worker.model.runner import ModelRunner
from worker.model.sampler import Sampler

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_TEXT = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock; they'll say we've 42 reasons.",
    "def main(argument: int) -> None:\n    for i in range(10):\n        print(i, argument)\n",
    "Größe, naïve café, Straße — «¿Qué?» 北京市 東京都 Привет, мир! नमस्ते 👩‍👩‍👧 🇩🇪 e\u0301",
]


def random_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model of a family with weights large enough for attention to be far from uniform."""
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "mistral":
        shape["sliding_window"] = None
    is_gemma = family == "gemma3_text"
    if is_gemma:  # both kinds of layers, and a scale of its own
        shape |= {
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
        }
    config = AutoConfig.for_model(family, **(shape | changes))
    config.architectures = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_((0 if is_gemma else 1) + 0.2 * values)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * values)
            else:
                parameter.copy_(values / parameter.shape[1] ** 0.5 * (4.0 if "embed" in name else 1.5))
    return model


def save_folder(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    """Writes model, tokenizer and chat template as a Hugging Face folder; options as for `save_pretrained`."""
    model.save_pretrained(path, **options)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(single_digits()),
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(path)
    return path


def single_digits() -> pre_tokenizers.PreTokenizer:
    """How SmolLM2 splits text."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def byte_level_tokenizer(pre_tokenizer: pre_tokenizers.PreTokenizer, vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE tokenizer trained on a few lines, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    return tokenizer


def make_runner(model: LoadedModel, backend: str, *, num_blocks: int = 64, block_size: int = 16) -> ModelRunner:
    """A float32 runner over a loaded model."""
    return ModelRunner(
        model.config,
        model.tensors,
        backend=load_backend(backend),
        dtype=torch.float32,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        sampler=Sampler(model.config.vocab_size, model.text.eos_token_ids),
        num_threads=1,
    )


def logits_at(runner: ModelRunner, token_ids: Sequence[int], positions: Sequence[int], chunk: int = 512) -> Tensor:
    """Logits after the tokens at these ascending positions, float32 [positions, vocab], by chunked prefill.

    The sequence takes every other block of the pool, last first, so that its blocks are nowhere neighbours.
    """
    size = runner.block_size
    blocks = list(range(runner.num_blocks - 1, 0, -2))[: -(-len(token_ids) // size) * len(runner.windows)]
    sampling = SamplingParams(seed=0, max_tokens=1)
    request = Request("r", 1, 0, [], 0, sampling, Band.HIGH, "", 0, block_ids=blocks, slot=0)
    rows = []
    for position in positions:
        request.token_ids.extend(token_ids[request.num_tokens : position + 1])
        while request.num_computed < request.num_tokens:
            count = min(chunk, request.num_tokens - request.num_computed)
            logits = runner.compute(Batch((BatchRow(request, count),)))
            request.num_computed += count
        rows.append(logits[0].clone())
    return torch.stack(rows)


def real_model_path() -> Path:
    """The default model's file, fetched if need be; skips the test where that is impossible."""
    try:
        return ensure_default_model()
    except DefaultModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")
