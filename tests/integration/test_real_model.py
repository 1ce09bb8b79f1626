"""The default model, from its GGUF file: the same numbers as `transformers`, and sane ones."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.support.models import logits_at, make_runner, real_model_path
from worker.model.loaded_model import LoadedModel
from worker.model.sanity import perplexity
from worker.model.weights import load_model

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path() -> Path:
    return real_model_path()


@pytest.fixture(scope="module")
def loaded(path: Path) -> LoadedModel:
    return load_model(path, torch.float32)


@torch.no_grad()
def test_logits_equal_those_of_transformers_reading_the_same_file(path: Path, loaded: LoadedModel) -> None:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=theirs)["tensors"]
    assert theirs.load_state_dict(read, strict=False).missing_keys == ["lm_head.weight"]  # tied
    theirs.tie_weights()
    token_ids = [1, *range(1000, 1040), 2, *range(40000, 40020)]
    positions = [0, 1, 30, 61]
    expected = theirs(torch.tensor([token_ids]), use_cache=False).logits[0, positions]
    actual = logits_at(make_runner(loaded, "reference"), token_ids, positions, chunk=25)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)  # logits reach 30
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_it_knows_english(loaded: LoadedModel) -> None:
    assert perplexity(make_runner(loaded, "reference"), loaded.text) < 20


def test_rows_left_interleaved_would_be_noticed(loaded: LoadedModel) -> None:
    broken = dict(loaded.tensors)
    for layer in range(loaded.config.num_layers):
        name = f"layers.{layer}.q"
        heads = broken[name].view(loaded.config.num_heads, 2, -1, loaded.config.hidden_size)
        broken[name] = heads.transpose(1, 2).reshape(broken[name].shape).contiguous()
    runner = make_runner(LoadedModel(loaded.config, broken, loaded.text), "reference")
    assert perplexity(runner, loaded.text) > loaded.config.vocab_size**0.5
