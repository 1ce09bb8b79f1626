"""Loads GGUF files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from worker.model.config import Activation, ModelConfig, RopeScaling, stretched_positions
from worker.model.gguf_header import GgufHeader, TensorPlace, read_header
from worker.model.gguf_tokenizer import text_parts
from worker.model.loaded_model import LoadedModel, ModelLoadError, allocate, check_config, check_shapes

# llama.cpp rotates neighbouring pairs for these, so its converter interleaves the halves of each head's Q and K rows.
_GEMMA = "gemma3"
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False, _GEMMA: False}
# What llama.cpp knows of Gemma 3 without a word in the file.
_GEMMA_PATTERN = 6  # one in so many layers sees everything
_GEMMA_LOCAL_THETA = 10000.0
_GEMMA_LARGEST = 62  # layers of the model that divides scores by the root of another number than the head size
_TENSOR_NAMES = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "lm_head"}
_LAYER_TENSOR_NAMES = {
    "attn_norm.weight": "attn_norm",
    "ffn_norm.weight": "mlp_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q_bias",
    "attn_k.bias": "k_bias",
    "attn_v.bias": "v_bias",
    "attn_output.bias": "o_bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
    "post_attention_norm.weight": "attn_post_norm",
    "post_ffw_norm.weight": "mlp_post_norm",
}
_ROPE_FACTORS = "rope_freqs.weight"
_ROTATED = re.compile(r"layers\.\d+\.(q|k)(_bias)?$")
_CHUNK_VALUES = 4 << 20  # values that are dequantized at once


def load_gguf(path: Path, dtype: torch.dtype, name: str) -> LoadedModel:
    """Loads one file; arguments and errors as for `load_model`."""
    header = read_header(path)
    places = {_canonical_name(place.name): place for place in header.tensors.values() if place.name != _ROPE_FACTORS}
    with path.open("rb") as file:
        config = _config(header, places, name, file)
        check_config(config)
        check_shapes(config, {name: place.shape for name, place in places.items()})
        text = text_parts(header.metadata, config.vocab_size)
        interleaved = _INTERLEAVED[header.metadata["general.architecture"]]
        tensors = {}
        for canonical, place in places.items():
            # Gemma's norms are stored with the offset that the configuration tells.
            tensor = _read_tensor(file, place, dtype, config.norm_offset if canonical.endswith("norm") else 0.0)
            if interleaved and (match := _ROTATED.match(canonical)):
                tensor = _separate_halves(tensor, config.num_heads if match[1] == "q" else config.num_kv_heads)
            tensors[canonical] = tensor
    return LoadedModel(config, tensors, text)


def _canonical_name(name: str) -> str:
    """Our name of a tensor; an unknown one keeps its own, and is refused when shapes are compared."""
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        return f"layers.{match[1]}.{_LAYER_TENSOR_NAMES.get(match[2], match[2])}"
    return _TENSOR_NAMES.get(name, name)


def _config(header: GgufHeader, places: Mapping[str, TensorPlace], name: str, file: BinaryIO) -> ModelConfig:
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _INTERLEAVED:
        raise ModelLoadError(f"{name} is of architecture {architecture}; supported are {', '.join(_INTERLEAVED)}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{name} has no {architecture}.{key} in its metadata")
        if isinstance(value, list):
            raise ModelLoadError(f"{name} has another {architecture}.{key} for each layer, which is not supported")
        return value

    if get("expert_count", 0):
        raise ModelLoadError(f"{name} is a mixture of experts, which is not supported")
    if "embed" not in places:
        raise ModelLoadError(f"{name} has no tensor token_embd.weight")
    heads = int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", int(get("embedding_length")) // max(1, heads)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(get(key, head_dim)) != head_dim:
            raise ModelLoadError(f"{name} has {architecture}.{key} {get(key)}; supported is the head size, {head_dim}")
    theta = float(get("rope.freq_base", 10000.0))
    scaling = _rope_scaling(header, architecture, head_dim, theta, file)
    layers, hidden = int(get("block_count")), int(get("embedding_length"))
    window, gemma = int(get("attention.sliding_window", 0)), architecture == _GEMMA
    pattern = _GEMMA_PATTERN if gemma else layers + 1
    windows = tuple(window if (layer + 1) % pattern else None for layer in range(layers)) if window else ()
    scale_size = hidden // max(1, heads) if layers == _GEMMA_LARGEST else head_dim
    return ModelConfig(
        name=name,
        vocab_size=places["embed"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_positions=stretched_positions(int(get("context_length")), scaling),
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings="lm_head" not in places,
        attention_bias="layers.0.q_bias" in places,
        o_bias="layers.0.o_bias" in places,
        qk_norm="layers.0.q_norm" in places,
        layer_windows=windows,
        local_rope_theta=_GEMMA_LOCAL_THETA if gemma else None,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embed_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=scale_size**-0.5 if gemma else None,
    )


def _rope_scaling(
    header: GgufHeader, architecture: str, head_dim: int, theta: float, file: BinaryIO
) -> RopeScaling | None:
    """The stretching of rotary frequencies, from metadata or from the tensor of factors that llama3 models have."""
    metadata, prefix = header.metadata, f"{architecture}.rope."
    if _ROPE_FACTORS in header.tensors:
        factors = _read_tensor(file, header.tensors[_ROPE_FACTORS], torch.float32)
        return llama3_scaling(factors.numpy().astype(np.float64), head_dim, theta)
    kind = metadata.get(prefix + "scaling.type", "linear")
    factor = float(metadata.get(prefix + "scaling.factor", metadata.get(prefix + "scale_linear", 1.0)))
    original = int(metadata.get(prefix + "scaling.original_context_length", metadata[f"{architecture}.context_length"]))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    if kind == "yarn":
        attention = metadata.get(prefix + "scaling.attn_factor")
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=float(metadata.get(prefix + "scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(metadata.get(prefix + "scaling.yarn_beta_slow", 1.0)),
            # The file's factor comes on top of the one that follows from the stretching; ours is the product.
            attention_factor=None if attention is None else float(attention) * (0.1 * math.log(factor) + 1.0),
        )
    raise ModelLoadError(f"rope scaling {kind} is not supported; supported are none, linear, yarn and llama3's factors")


def llama3_scaling(factors: np.ndarray[Any, np.dtype[np.float64]], head_dim: int, theta: float) -> RopeScaling:
    """The llama3 parameters that yield these frequency divisors, [head_dim / 2].

    Between the unscaled and the fully scaled frequencies the inverse divisor is linear in the frequency; two divisors
    there tell original length and high frequency factor for a low frequency factor of 1 (only ratios of the three
    matter). Where there are fewer, the published values of Llama 3 are tried.

    Raises:
        ModelLoadError: no llama3 parameters give these divisors.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if factors.shape != frequencies.shape:
        raise ModelLoadError(f"{_ROPE_FACTORS} has {factors.shape} values, expected {frequencies.shape}")
    factor = float(factors.max())
    candidates = [(8192.0, 4.0)]
    between = (factors > 1.0 + 1e-5) & (factors < factor * (1 - 1e-5))
    if between.sum() >= 2:
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(frequencies[between], smooth, 1)
        high = 1 - 1 / offset
        candidates.insert(0, (float(slope * 2 * math.pi * (high - 1)), float(high)))
    for original, high in candidates:
        scaling = RopeScaling("llama3", factor, round(original), low_freq_factor=1.0, high_freq_factor=round(high, 4))
        if np.allclose(_llama3_divisors(scaling, frequencies), factors, rtol=1e-3):
            return scaling
    raise ModelLoadError(f"{_ROPE_FACTORS} does not hold the factors of llama3 scaling; no other kind is supported")


def _llama3_divisors(
    scaling: RopeScaling, frequencies: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth))


def _read_tensor(file: BinaryIO, place: TensorPlace, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """Reads and dequantizes one tensor a few rows at a time, so that no float32 copy of the whole exists; takes an
    offset from its values."""
    rows = math.prod(place.byte_shape[:-1])
    row_bytes, row_values = place.byte_shape[-1], place.shape[-1]
    result = allocate((rows, row_values), dtype)
    step = max(1, _CHUNK_VALUES // row_values)
    file.seek(place.offset)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        stored = np.empty((count, row_bytes), dtype=np.uint8)
        if file.readinto(stored.data) != stored.nbytes:  # type: ignore[attr-defined]
            raise ModelLoadError(f"{file.name} ends inside tensor {place.name}: it is truncated")
        try:
            values = dequantize(stored, place.kind)
        except NotImplementedError as error:
            raise ModelLoadError(f"tensor {place.name} is {place.kind.name}, which is not supported") from error
        result[start : start + count] = torch.from_numpy(np.asarray(values, dtype=np.float32)) - offset
    return result.reshape(place.shape)


def _separate_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Puts each head's rows (x0, y0, x1, y1, ...) into the order (x0, x1, ..., y0, y1, ...); [heads*head_dim, ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    result = allocate(tuple(rows.shape), rows.dtype)
    return result.copy_(pairs.transpose(1, 2).reshape(rows.shape))
