"""Writes a model as a Hugging Face folder through our own loader, so that all engines compute with equal weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from worker.model.config import ModelConfig
from worker.model.loaded_model import LoadedModel
from worker.model.weights import load_model

_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_OTHER_NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def hugging_face_name(name: str) -> str:
    """A canonical tensor name (see `ModelConfig`) as LlamaForCausalLM calls it. Raises KeyError for what it lacks."""
    if not name.startswith("layers."):
        return _OTHER_NAMES[name]
    _, index, tensor = name.split(".")
    return f"model.layers.{index}.{_LAYER_NAMES[tensor]}"


def hugging_face_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under their Hugging Face names; the tensors themselves are shared."""
    return {hugging_face_name(name): tensor for name, tensor in tensors.items()}


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """The configuration as the fields of LlamaConfig. Raises ValueError for what a plain llama does not have."""
    if config.attention_bias or config.o_bias or config.qk_norm or config.layer_windows or config.rope_scaling:
        raise ValueError(f"{config.name} is not a plain llama: only those are exported")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
    }


def export_model(model: LoadedModel, folder: Path) -> None:
    """Writes config.json, model.safetensors and tokenizer.json; weights keep the dtype they were loaded in."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in hugging_face_state(model.tensors).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(model.text.tokenizer_json)
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
        "bos_token_id": model.text.bos_token_id,
        "eos_token_id": model.text.eos_token_ids[0] if model.text.eos_token_ids else None,
        **llama_config(model.config),
    }
    # Last: whoever finds it finds a complete folder.
    (folder / "config.json").write_text(json.dumps(document, indent=2))


def export_bfloat16(path: Path, folder: Path) -> None:
    """Loads a model file and writes it as a bfloat16 Hugging Face folder."""
    export_model(load_model(path, torch.bfloat16), folder)
