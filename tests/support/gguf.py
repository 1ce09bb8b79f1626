"""Writes GGUF files as llama.cpp's converter does, from a `transformers` model and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer
from transformers import PreTrainedModel

NORMAL, CONTROL = 1, 3
_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    pre: str | None = "smollm",
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: np.ndarray[Any, Any] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Writes the model; `metadata` are further keys, floats, ints, bools or strings, that replace the usual ones."""
    config = model.config
    is_gemma = config.model_type == "gemma3_text"
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    rope = config.rope_parameters["full_attention"] if is_gemma else config.rope_parameters
    keys: dict[str, Any] = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
    }
    if is_gemma:
        keys["gemma3.attention.sliding_window"] = config.sliding_window
    if architecture == "llama":
        keys["llama.rope.dimension_count"] = config.head_dim
    keys |= tokenizer_metadata(tokenizer, pre) | (metadata or {})
    writer = GGUFWriter(path, keys.pop("general.architecture", architecture))
    for key, value in keys.items():
        _add(writer, key, value)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleave(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if is_gemma and name.endswith("norm.weight"):
            values = values + 1
        for old, new in (_NAMES | _GEMMA_NAMES if is_gemma else _NAMES).items():
            name = name.replace(old, new)
        kind = matrices if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """From rotary halves apart to neighbouring pairs, row by row of each head, as the converter stores llama's."""
    head_dim = len(rows) // num_heads
    order = [head * head_dim + half * (head_dim // 2) + i for head in range(num_heads)
             for i in range(head_dim // 2) for half in range(2)]  # fmt: skip
    return rows[order]


def tokenizer_metadata(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    """The `tokenizer.*` keys of a byte-level BPE tokenizer with bos 1 and eos 2."""
    stored = json.loads(tokenizer.to_str())
    vocabulary = stored["model"]["vocab"] | {token["content"]: token["id"] for token in stored["added_tokens"]}
    special = {token["content"] for token in stored["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    return keys if pre is None else keys | {"tokenizer.ggml.pre": pre}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
