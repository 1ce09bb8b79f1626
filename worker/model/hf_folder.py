"""Loads Hugging Face folders: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from worker.model.config import Activation, ModelConfig, RopeScaling, stretched_positions
from worker.model.loaded_model import LoadedModel, ModelLoadError, TextParts, allocate, check_config, check_shapes

_GEMMA = "Gemma3ForCausalLM"
_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", _GEMMA)
_GEMMA_PATTERN = 6  # every so many layers of Gemma 3 one sees everything, where the file does not say
_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_TENSOR_NAMES = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "lm_head"}
_LAYER_TENSOR_NAMES = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.bias": "o_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_GEMMA_TENSOR_NAMES = {
    "post_attention_layernorm.weight": "attn_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
}
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")  # old exports stored these; they follow from the configuration


def load_folder(path: Path, dtype: torch.dtype, name: str) -> LoadedModel:
    """Loads one folder; arguments and errors as for `load_model`."""
    raw = _read_json(path / "config.json")
    config = folder_config(raw, name)
    check_config(config)
    text = _text_parts(path, raw)
    shapes: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        places = []
        for file in _tensor_files(path):
            try:
                stored = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from error
            for key in stored.keys():  # noqa: SIM118 - not a mapping
                canonical = _canonical_name(key, config)
                if not _IGNORED.fullmatch(key) and not (canonical == "lm_head" and config.tie_embeddings):
                    places.append((canonical, stored, key))
                    shapes[canonical] = tuple(stored.get_slice(key).get_shape())
        check_shapes(config, shapes)
        for canonical, stored, key in places:
            # A copy, because what is read is a view of the mapped file, which is to be closed.
            tensors[canonical] = allocate(shapes[canonical], dtype).copy_(stored.get_tensor(key))
    return LoadedModel(config, tensors, text)


def folder_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """The shape that a config.json describes.

    Raises:
        ModelLoadError: it is of an architecture, or asks for something, that is not supported.
    """
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        raise ModelLoadError(f"{name} is of architecture {architecture}; supported are {', '.join(_ARCHITECTURES)}")

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ModelLoadError(f"config.json of {name} has no {key}")
        return raw[key]

    gemma = architecture == _GEMMA
    wanted = "gelu_pytorch_tanh" if gemma else "silu"
    activation = raw.get("hidden_activation" if gemma else "hidden_act", wanted)
    if activation != wanted:
        raise ModelLoadError(f"activation {activation} is not supported; supported is {wanted}")
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise ModelLoadError(f"{key} is not supported")
    if raw.get("mlp_bias"):
        raise ModelLoadError("biases in the MLP (mlp_bias) are not supported")
    if raw.get("quantization_config"):
        raise ModelLoadError("quantized safetensors are not supported; supported are float32, float16 and bfloat16")
    heads = int(need("num_attention_heads"))
    bias = architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False))
    positions = int(need("max_position_embeddings"))
    theta, scaling = _rope(raw, positions)
    hidden, local_theta = int(need("hidden_size")), None
    if gemma:
        local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise ModelLoadError("rope scaling of layers with a sliding window is not supported")
        local_theta = float(local.get("rope_theta") or raw.get("rope_local_base_freq") or 10000.0)
    return ModelConfig(
        name=name,
        vocab_size=int(need("vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(need("intermediate_size")),
        num_layers=int(need("num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(need("hidden_size")) // max(1, heads)),
        max_positions=stretched_positions(positions, scaling),
        rms_norm_eps=float(need("rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", gemma)),
        attention_bias=bias,
        o_bias=bias and architecture != "Qwen2ForCausalLM",
        qk_norm=gemma or architecture == "Qwen3ForCausalLM",
        layer_windows=_layer_windows(raw, architecture),
        local_rope_theta=local_theta,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=float(need("query_pre_attn_scalar")) ** -0.5 if gemma else None,
    )


def _rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, in the spelling with `rope_parameters` or the older one with `rope_theta`, `rope_scaling`."""
    parameters = raw.get("rope_parameters") or {}
    values = {**(raw.get("rope_scaling") or {}), **parameters.get("full_attention", parameters)}
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise ModelLoadError(f"rope scaling {kind} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    if float(values.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError("rotation of a part of the head (partial_rotary_factor) is not supported")
    if not values.get("truncate", True):
        raise ModelLoadError("yarn without truncate is not supported")
    if kind == "default":
        return theta, None
    original = int(
        raw.get("original_max_position_embeddings") or values.get("original_max_position_embeddings") or max_positions
    )
    if kind == "dynamic":
        original = max_positions  # this kind knows no other length
    factor = values.get("factor") or (max_positions / original if kind == "yarn" else None)
    if factor is None:
        raise ModelLoadError(f"rope scaling {kind} has no factor in config.json")
    optional = {
        key: float(values[key])
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        if values.get(key) is not None
    }
    if values.get("mscale") and values.get("mscale_all_dim") and "attention_factor" not in optional:
        numerator, denominator = (
            1.0 + 0.1 * float(values[key]) * math.log(max(1.0, factor)) for key in ("mscale", "mscale_all_dim")
        )
        optional["attention_factor"] = numerator / denominator
    return theta, RopeScaling(kind, float(factor), original, **optional)


def _layer_windows(raw: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    """The window of every layer, empty if there is none; Qwen models have it only where they say so."""
    window, qwen = raw.get("sliding_window"), architecture.startswith("Qwen")
    if window is None or (qwen and not raw.get("use_sliding_window", False)):
        return ()
    layers = range(int(raw["num_hidden_layers"]))
    if raw.get("layer_types"):
        if unknown := set(raw["layer_types"]) - {"sliding_attention", "full_attention"}:
            raise ModelLoadError(f"layers with {sorted(unknown)[0]} are not supported")
        is_sliding = [kind == "sliding_attention" for kind in raw["layer_types"]]
    elif architecture == _GEMMA:
        pattern = int(raw.get("sliding_window_pattern") or _GEMMA_PATTERN)
        is_sliding = [bool((layer + 1) % pattern) for layer in layers]
    else:
        first = int(raw.get("max_window_layers", 0)) if qwen else 0
        is_sliding = [layer >= first for layer in layers]
    return tuple(int(window) if sliding else None for sliding in is_sliding) if any(is_sliding) else ()


def _canonical_name(name: str, config: ModelConfig) -> str:
    """Our name of a tensor; an unknown one keeps its own, and is refused when shapes are compared."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        names = _LAYER_TENSOR_NAMES | _GEMMA_TENSOR_NAMES if config.post_norms else _LAYER_TENSOR_NAMES
        return f"layers.{match[1]}.{names.get(match[2], match[2])}"
    return _TENSOR_NAMES.get(name, name)


def _tensor_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = set(_read_json(index)["weight_map"].values())
        files = [path / name for name in sorted(names)]
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(
                f"{file} is missing; supported are weights as safetensors, in one file or with an index"
            )
    return files


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def _text_parts(path: Path, raw: Mapping[str, Any]) -> TextParts:
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadError(f"{path} has no tokenizer.json; other tokenizer files are not supported")
    tokenizer_json = (path / "tokenizer.json").read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:
        raise ModelLoadError(f"{path / 'tokenizer.json'} is damaged: {error}") from error
    settings = _read_json(path / "tokenizer_config.json", optional=True)
    generation = _read_json(path / "generation_config.json", optional=True)
    bos_token, eos_token = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
    bos = tokenizer.token_to_id(bos_token) if bos_token else raw.get("bos_token_id")
    eos = tokenizer.token_to_id(eos_token) if eos_token else None
    listed = generation.get("eos_token_id", raw.get("eos_token_id"))
    ends = [*(listed if isinstance(listed, list) else [listed]), eos]
    adds_bos = settings.get("add_bos_token")
    if adds_bos is None:  # then the tokenizer's own post-processing tells
        adds_bos = bos is not None and tokenizer.encode("").ids[:1] == [bos]
    return TextParts(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(path, settings),
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        bos_token_id=bos,
        add_bos_token=bool(adds_bos) and bos is not None,
        bos_token=bos_token or (tokenizer.id_to_token(bos) or "" if bos is not None else ""),
        eos_token=eos_token,
    )


def _token_text(value: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object with the text as content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value or ""


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)
