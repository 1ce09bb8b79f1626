"""Logits of every supported family equal those of `transformers` on the same weights, within float32 rounding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models import FAMILIES, logits_at, make_runner, random_model, save_folder
from worker.cache.groups import group_layers
from worker.kernels import BACKENDS
from worker.model.weights import LoadedModel, load_model

TOLERANCE = 1e-4  # absolute, of logits with a standard deviation near 1.5
FAR = 4500
ROPE_KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-tuned": {
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@torch.no_grad()
def expected_logits(model: PreTrainedModel, token_ids: list[int], positions: list[int]) -> Tensor:
    result: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0, positions]
    return result


def saved(model: PreTrainedModel, path: Path, **options: Any) -> LoadedModel:
    return load_model(save_folder(model, path, **options), torch.float32)


def check(model: PreTrainedModel, loaded: LoadedModel, backend: str, positions: list[int], chunk: int = 512) -> None:
    token_ids = random_tokens(positions[-1] + 1)
    expected = expected_logits(model, token_ids, positions)
    num_tables = group_layers(loaded.config.windows).num_tables
    runner = make_runner(loaded, backend, num_blocks=2 * num_tables * (positions[-1] // 16 + 1) + 2)
    actual = logits_at(runner, token_ids, positions, chunk)
    assert expected.std() > 0.5, "weights that give flat logits would hide errors"
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(tmp_path: Path, family: str, tied: bool, backend: str) -> None:
    model = random_model(family, tie_word_embeddings=tied)
    loaded = saved(model, tmp_path)
    assert loaded.config.tie_embeddings == tied
    assert loaded.config.attention_bias == (family == "qwen2")
    assert loaded.config.qk_norm == (family in ("qwen3", "gemma3_text"))
    check(model, loaded, backend, [0, 1, 15, 16, 17, 100, 299], chunk=37)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_biases_on_all_projections_and_a_head_size_of_its_own(tmp_path: Path, family: str, backend: str) -> None:
    model = random_model(family, attention_bias=True, head_dim=24)
    loaded = saved(model, tmp_path)
    assert (loaded.config.attention_bias, loaded.config.o_bias, loaded.config.head_dim) == (True, True, 24)
    check(model, loaded, backend, [0, 20, 60])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "changes"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 0})],
    ids=["mistral", "qwen2"],
)
@pytest.mark.parametrize("window", [1, 16, 23])
def test_sliding_window(tmp_path: Path, family: str, changes: dict[str, Any], window: int, backend: str) -> None:
    model = random_model(family, sliding_window=window, **changes)
    loaded = saved(model, tmp_path)
    assert set(loaded.config.windows) == {window}
    positions = sorted({max(0, window - 2), window - 1, window, window + 1, 3 * window, 90})
    check(model, loaded, backend, positions, chunk=13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "changes", "num_tables"),
    [
        ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 6}, 7),
        ("gemma3_text", {"num_hidden_layers": 4, "sliding_window_pattern": 2}, 2),
        ("qwen2", {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1}, 3),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, 2),
    ],
    ids=["gemma3", "gemma3-half", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("window", [1, 23])
def test_a_sliding_window_in_some_layers(
    tmp_path: Path, family: str, changes: dict[str, Any], num_tables: int, window: int, backend: str
) -> None:
    model = random_model(family, sliding_window=window, **changes)
    loaded = saved(model, tmp_path)
    assert set(loaded.config.windows) == {window, None}
    assert group_layers(loaded.config.windows).num_tables == num_tables
    positions = sorted({max(0, window - 2), window - 1, window, window + 1, 3 * window, 90})
    check(model, loaded, backend, positions, chunk=13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_two_rotations_of_gemma_at_far_positions(tmp_path: Path, backend: str) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    loaded = saved(random_model("gemma3_text", rope_parameters=rope), tmp_path)
    assert (loaded.config.rope_theta, loaded.config.local_rope_theta) == (1e6, 10000.0)
    assert loaded.config.rope_scaling is not None
    check(random_model("gemma3_text", rope_parameters=rope), loaded, backend, [300, 2047])


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_positions(tmp_path: Path, backend: str) -> None:
    model = random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    check(model, saved(model, tmp_path), backend, [2047, 2048, FAR])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_scaling_at_far_positions(tmp_path: Path, kind: str, backend: str) -> None:
    rope = {"rope_type": kind.split("-")[0], "rope_theta": 20000.0, **ROPE_KINDS[kind]}
    model = random_model("llama", rope_parameters=rope)
    loaded = saved(model, tmp_path)
    assert loaded.config.rope_scaling is not None
    check(model, loaded, backend, [10, 300, 1500, FAR])


def test_ignored_rope_scaling_would_be_noticed(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 20000.0, **ROPE_KINDS["llama3"]}
    model = random_model("llama", rope_parameters=rope)
    save_folder(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 20000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError, match="not close"):
        check(model, load_model(tmp_path, torch.float32), "reference", [1500])


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_dynamic_rope_scaling_token_by_token(tmp_path: Path, backend: str) -> None:
    """The base grows with the sequence, and cached keys keep theirs: as `transformers` does when it generates."""
    original, total = 48, 110
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = random_model("llama", rope_parameters=rope, max_position_embeddings=original)
    loaded = saved(model, tmp_path)
    assert loaded.config.max_positions == 4 * original
    token_ids = random_tokens(total)
    positions = list(range(original - 4, total))
    output = model(torch.tensor([token_ids[: positions[0]]]), use_cache=True)
    expected = []
    for position in positions:
        token = torch.tensor([[token_ids[position]]])
        output = model(token, cache=output.past_key_values, use_cache=True)
        expected.append(output.logits[0, -1])
    actual = logits_at(make_runner(loaded, backend), token_ids, positions)
    torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=TOLERANCE)


def test_the_older_spelling_of_rope_means_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 20000.0, **ROPE_KINDS["yarn"]}
    save_folder(random_model("llama", rope_parameters=rope), tmp_path)
    new = load_model(tmp_path, torch.float32).config
    config = json.loads((tmp_path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = load_model(tmp_path, torch.float32).config
    assert old == new
    assert old.rope_theta == 20000.0
    assert old.rope_scaling is not None
    assert old.rope_scaling.kind == "yarn"


def test_sharded_weights_are_the_same_model(tmp_path: Path) -> None:
    model = random_model("llama")
    whole = saved(model, tmp_path / "whole")
    sharded = saved(model, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert sharded.tensors.keys() == whole.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(sharded.tensors[name], tensor), name
