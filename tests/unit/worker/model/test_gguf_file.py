import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.support.gguf import write_gguf
from tests.support.models import (
    FAMILIES,
    byte_level_tokenizer,
    logits_at,
    make_runner,
    random_model,
    save_folder,
    single_digits,
)
from worker.model.config import RopeScaling
from worker.model.gguf_file import llama3_scaling
from worker.model.loaded_model import ModelLoadError
from worker.model.weights import load_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level_tokenizer(single_digits())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_those_of_the_folder(tmp_path: Path, tokenizer: Any, family: str, tied: bool) -> None:
    changes = {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 7}
    model = random_model(family, tie_word_embeddings=tied, **(changes if family == "gemma3_text" else {}))
    folder = load_model(save_folder(model, tmp_path / "folder"), torch.float32, "m")
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, tokenizer), torch.float32)
    expected = folder.config
    assert loaded.config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    for name in type(expected).__slots__:
        if name != "rms_norm_eps":  # stored as float32
            assert getattr(loaded.config, name) == getattr(expected, name), name
    assert loaded.tensors.keys() == folder.tensors.keys()
    for name, tensor in folder.tensors.items():
        if folder.config.norm_offset and name.endswith("norm"):  # stored with the offset, in float32
            torch.testing.assert_close(loaded.tensors[name], tensor, rtol=0, atol=1e-6)
        else:
            assert torch.equal(loaded.tensors[name], tensor), name


def test_a_folder_with_one_gguf_file_is_that_model(tmp_path: Path, tokenizer: Any) -> None:
    write_gguf(tmp_path / "m.gguf", random_model("llama"), tokenizer)
    assert load_model(tmp_path, torch.bfloat16, "named").config.name == "named"


def test_llama_biases_are_separated_like_their_rows(tmp_path: Path, tokenizer: Any) -> None:
    model = random_model("llama", attention_bias=True)
    folder = load_model(save_folder(model, tmp_path / "folder"), torch.float32)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, tokenizer), torch.float32)
    for name in ("q_bias", "k_bias", "v_bias", "o_bias"):
        assert torch.equal(loaded.tensors[f"layers.1.{name}"], folder.tensors[f"layers.1.{name}"]), name


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16])
def test_quantized_matrices_are_dequantized_by_rows(
    tmp_path: Path, tokenizer: Any, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.model.gguf_file._CHUNK_VALUES", 1000)  # several chunks, the last one short
    model = random_model("qwen2")
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, tokenizer, matrices=kind), torch.bfloat16)
    stored = model.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    expected = torch.from_numpy(np.asarray(dequantize(quantize(stored, kind), kind), dtype=np.float32))
    assert torch.equal(loaded.tensors["layers.1.down"], expected.bfloat16())
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {torch.bfloat16}


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)


@pytest.mark.parametrize(
    ("head_dim", "theta", "factor", "low", "high", "original"),
    [
        (64, 500000.0, 32.0, 1.0, 4.0, 8192),
        (128, 500000.0, 8.0, 1.0, 4.0, 8192),
        (128, 10000.0, 4.0, 1.0, 8.0, 2048),
        (16, 500000.0, 8.0, 1.0, 4.0, 8192),
        (128, 10000.0, 4.0, 2.0, 8.0, 2048),
    ],
)
def test_llama3_parameters_follow_from_the_factors(
    head_dim: int, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    stored = llama3_factors(head_dim, theta, factor, low, high, original).astype(np.float32).astype(np.float64)
    scaling = llama3_scaling(stored, head_dim, theta)
    assert (scaling.kind, scaling.low_freq_factor) == ("llama3", 1.0)
    assert scaling.factor == pytest.approx(factor)
    assert scaling.original_max_positions == pytest.approx(original / low, abs=1)
    assert scaling.high_freq_factor == pytest.approx(high / low, rel=1e-3)


def test_factors_of_another_kind_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="does not hold the factors of llama3"):
        llama3_scaling(np.linspace(1, 9, 32), 64, 10000.0)
    with pytest.raises(ModelLoadError, match=r"\(31,\) values, expected \(32,\)"):
        llama3_scaling(np.ones(31), 64, 10000.0)


def test_a_llama3_file_computes_what_the_folder_does(tmp_path: Path, tokenizer: Any) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    model = random_model("llama", rope_parameters=rope, head_dim=64)
    factors = llama3_factors(64, 10000.0, 8.0, 1.0, 4.0, 512)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", model, tokenizer, rope_factors=factors), torch.float32)
    token_ids = list(range(300)) * 2
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0, [599]]
    actual = logits_at(make_runner(loaded, "reference", num_blocks=90), token_ids, [599])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("metadata", "scaling", "positions"),
    [
        ({"scaling.type": "none"}, None, 8192),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, RopeScaling("linear", 4.0, 8192), 8192),
        ({"scale_linear": 2.0}, RopeScaling("linear", 2.0, 8192), 8192),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 4096},
            RopeScaling("yarn", 4.0, 4096),
            16384,
        ),
    ],
)
def test_rope_scaling_metadata(
    tmp_path: Path, tokenizer: Any, metadata: dict[str, Any], scaling: RopeScaling | None, positions: int
) -> None:
    keys = {f"llama.rope.{key}": value for key, value in metadata.items()}
    config = load_model(
        write_gguf(tmp_path / "m.gguf", random_model("llama"), tokenizer, metadata=keys), torch.float32
    ).config
    assert config.rope_scaling == scaling
    assert config.max_positions == positions


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma2"}, "architecture gemma2; supported are llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling longrope is not supported; supported are none, linear"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8; supported is the head size, 16"),
        ({"llama.attention.head_count": [4, 4]}, "another llama.attention.head_count for each layer"),
        ({"llama.feed_forward_length": 95}, r"layers\.0\.gate has shape \(96, 64\), the configuration says \(95, 64\)"),
        ({"llama.block_count": 3}, r"9 tensors are missing, the first is layers\.2\.attn_norm"),
        ({"llama.block_count": 1}, r"9 tensors are not of a supported model, the first is layers\.1\."),
        ({"llama.attention.head_count_kv": 3}, "4 heads are not a multiple of 3 KV heads"),
        ({"llama.attention.head_count": 0}, "heads: 0, expected at least 1"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer bert is not supported in GGUF files; supported are gpt2"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "320 tokens, and types for 2"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer viking is not supported; supported are default"),
        ({"tokenizer.ggml.merges": ["a nonsense"]}, "the vocabulary is damaged"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos token id 320 is outside the vocabulary of 320 tokens"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, tokenizer: Any, metadata: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"), tokenizer, metadata=metadata)
    with pytest.raises(ModelLoadError, match=message):
        load_model(path, torch.float32)


@pytest.mark.parametrize("keep", [0, 3, 20, 1000, -1, -4000])
def test_a_truncated_file_is_refused(tmp_path: Path, tokenizer: Any, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"), tokenizer)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"is not a GGUF file|truncated"):
        load_model(path, torch.float32)


def test_a_file_that_is_not_gguf_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(100))
    with pytest.raises(ModelLoadError, match="version 1; supported are 2 and 3"):
        load_model(tmp_path / "m.gguf", torch.float32)
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(tmp_path / "other.gguf", torch.float32)
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json and 0 \.gguf files"):
        load_model(tmp_path, torch.float32)
