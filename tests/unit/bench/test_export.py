"""What is exported is what was loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.export import export_model, hugging_face_name, llama_config
from worker.model.config import ModelConfig
from worker.model.loaded_model import LoadedModel, TextParts, expected_shapes
from worker.model.weights import load_model

CONFIG = ModelConfig(
    name="tiny",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
TOKENIZER = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}'


def tiny_model(config: ModelConfig) -> LoadedModel:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in expected_shapes(config).items()
    }
    return LoadedModel(config, tensors, TextParts(TOKENIZER, "", (1,), 0, False, "a", "b"))


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_loads_as_it_was(tmp_path: Path, tied: bool):
    model = tiny_model(replace(CONFIG, tie_embeddings=tied))
    export_model(model, tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16, "tiny")
    assert loaded.config == model.config
    assert loaded.tensors.keys() == model.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in model.tensors.items())
    assert loaded.text.eos_token_ids == (1,)


def test_names():
    assert hugging_face_name("layers.11.down") == "model.layers.11.mlp.down_proj.weight"
    assert hugging_face_name("embed") == "model.embed_tokens.weight"


@pytest.mark.parametrize("beyond", [{"qk_norm": True}, {"attention_bias": True}, {"layer_windows": (8, None)}])
def test_what_a_plain_llama_lacks_is_refused(beyond: dict[str, object]):
    with pytest.raises(ValueError, match="not a plain llama"):
        llama_config(replace(CONFIG, **beyond))
