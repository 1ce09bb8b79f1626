import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import CHAT_TEMPLATE, random_model, save_folder
from worker.model.hf_folder import folder_config
from worker.model.loaded_model import ModelLoadError
from worker.model.weights import load_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(random_model("llama"), tmp_path / "m")


def change(file: Path, **values: Any) -> None:
    stored = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in stored.items() if value != "absent"}))


def test_what_a_sparse_config_means() -> None:
    config = folder_config(LLAMA, "m")
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert config.rope_scaling is None
    assert not config.tie_embeddings
    assert config.windows == (None, None)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"use_sliding_window": True}, None),  # every layer is below max_window_layers
        ({"use_sliding_window": True, "max_window_layers": 28}, None),
        ({"use_sliding_window": True, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, 64),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
        ({"use_sliding_window": False, "max_window_layers": 0}, None),
    ],
)
def test_qwen_has_a_sliding_window_only_where_it_says_so(changes: dict[str, Any], window: int | None) -> None:
    assert folder_config(QWEN2 | changes, "m").windows == (window, window)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; supported are LlamaForCausalLM, Mis"),
        ({"architectures": None}, "architecture none; supported are"),
        ({"hidden_size": None}, "config.json of m has no hidden_size"),
        ({"hidden_act": "gelu"}, "activation gelu is not supported; supported is silu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantized safetensors are not supported"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "rope scaling longrope is not supported; supported are d",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling linear has no factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "without truncate"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        folder_config(LLAMA | changes, "m")


def test_a_window_in_some_layers() -> None:
    config = folder_config(QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "m")
    assert config.windows == (None, 64)
    kinds = ["sliding_attention", "full_attention"]
    assert folder_config(QWEN2 | {"use_sliding_window": True, "layer_types": kinds}, "m").windows == (64, None)


GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "rope_theta": 1e6,
}


def test_what_a_sparse_gemma_config_means() -> None:
    config = folder_config(GEMMA3, "m")
    assert config.windows == (512, 512, 512, 512, 512, None, 512)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 10000.0)
    assert (config.attention_scale, config.embed_scale) == (0.125, config.hidden_size**0.5)
    assert config.tie_embeddings
    assert config.qk_norm
    assert folder_config(GEMMA3 | {"sliding_window_pattern": 2}, "m").windows == (512, None) * 3 + (512,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "activation silu is not supported; supported is gelu_pytorch_tanh"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"query_pre_attn_scalar": None}, "has no query_pre_attn_scalar"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "scaling of layers with a sliding window",
        ),
    ],
)
def test_what_is_not_supported_of_gemma_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        folder_config(GEMMA3 | changes, "m")


def test_yarn_and_its_default_values() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    scaling = folder_config(LLAMA | {"rope_scaling": rope}, "m").rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_positions, scaling.attention_factor) == (4.0, 1024, None)
    deepseek = rope | {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = folder_config(LLAMA | {"rope_scaling": deepseek}, "m").rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == 1.0
    config = folder_config(LLAMA | {"rope_scaling": rope | {"original_max_position_embeddings": 4096}}, "m")
    assert config.max_positions == 16384


def test_text_parts(folder: Path) -> None:
    text = load_model(folder, torch.float32).text
    assert text.chat_template == CHAT_TEMPLATE
    assert text.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert (text.bos_token_id, text.bos_token, text.eos_token) == (1, "<|im_start|>", "<|im_end|>")
    assert text.eos_token_ids == (2,)
    assert text.add_bos_token is False


def test_every_list_of_end_tokens_counts(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[0, 7])
    assert load_model(folder, torch.float32).text.eos_token_ids == (0, 7, 2)
    (folder / "generation_config.json").unlink()
    change(folder / "config.json", eos_token_id=5)
    assert load_model(folder, torch.float32).text.eos_token_ids == (5, 2)


def test_templates_and_tokens_in_their_other_places(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    change(folder / "tokenizer_config.json", chat_template=named, eos_token={"content": "<|endoftext|>"})
    text = load_model(folder, torch.float32).text
    assert (text.chat_template, text.eos_token, text.eos_token_ids) == ("D", "<|endoftext|>", (2, 0))
    change(folder / "tokenizer_config.json", chat_template="absent", add_bos_token=True)
    text = load_model(folder, torch.float32).text
    assert (text.chat_template, text.add_bos_token) == ("", True)


def test_a_tokenizer_that_adds_bos_by_itself_is_noticed(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert load_model(folder, torch.float32).text.add_bos_token is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"no config\.json and 0 \.gguf files"),
        ("model.safetensors", r"model\.safetensors is missing; supported are weights as safetensors"),
        ("tokenizer.json", r"has no tokenizer\.json"),
    ],
)
def test_missing_files_are_named(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=message):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:40])
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load_model(folder, torch.float32)


def test_weights_that_do_not_fit_the_config_are_named(folder: Path) -> None:
    change(folder / "config.json", intermediate_size=95)
    with pytest.raises(
        ModelLoadError, match=r"layers\.0\.gate has shape \(96, 64\), the configuration says \(95, 64\)"
    ):
        load_model(folder, torch.float32)
    change(folder / "config.json", intermediate_size=96)
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="1 tensors are missing, the first is lm_head"):
        load_model(folder, torch.float32)
    save_file(weights | {"lm_head.weight": head, "model.extra": head.clone()}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1 tensors are not of a supported model, the first is model\.extra"):
        load_model(folder, torch.float32)


def test_tied_models_ignore_a_stored_head(folder: Path) -> None:
    change(folder / "config.json", tie_word_embeddings=True)
    assert "lm_head" not in load_model(folder, torch.bfloat16).tensors
