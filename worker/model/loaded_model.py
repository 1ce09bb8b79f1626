"""What loading a model yields, and what makes it fail."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.model.config import ModelConfig


class ModelLoadError(Exception):
    """The path holds no model that can be served; the message says what was found and what is supported."""


@dataclass(frozen=True, slots=True)
class TextParts:
    """What turns text into the model's tokens and back; the fields of `ModelDescription` of the same names."""

    tokenizer_json: bytes  # of the `tokenizers` library
    chat_template: str  # Jinja; empty if the model has none
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos_token: bool
    bos_token: str
    eos_token: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: its shape, its weights by canonical name (see `ModelConfig`), all of one dtype, its text."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    text: TextParts


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor in memory of its own, which goes back to the system as soon as the tensor is let go.

    Kernels pack the weights into copies, and the heap would keep what the originals took.
    """
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(shape)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names of all tensors that a model of this shape has, with their shapes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.o_bias:
        layer["o_bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.post_norms:
        layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compares the tensors of a file, by canonical name, with those that its configuration promises.

    Raises:
        ModelLoadError: one is missing, is of another shape, or has no place in a model of this shape.
    """
    expected = expected_shapes(config)
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelLoadError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise ModelLoadError(f"{len(unknown)} tensors are not of a supported model, the first is {unknown[0]}")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelLoadError(f"tensor {name} has shape {tuple(found[name])}, the configuration says {shape}")


def check_config(config: ModelConfig) -> None:
    """Checks what the forward pass relies on.

    Raises:
        ModelLoadError: the numbers do not fit together.
    """
    counts = {
        "vocabulary": config.vocab_size,
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "KV heads": config.num_kv_heads,
        "head size": config.head_dim,
        "positions": config.max_positions,
    }
    for name, count in counts.items():
        if count < 1:
            raise ModelLoadError(f"{name}: {count}, expected at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(f"{config.num_heads} heads are not a multiple of {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        raise ModelLoadError(f"head size {config.head_dim} is odd, rotary positions need pairs")
    if len(config.windows) != config.num_layers:
        raise ModelLoadError(f"{config.num_layers} layers, and {len(config.windows)} of them have a kind of attention")
    for window in config.windows:
        if window is not None and window < 1:
            raise ModelLoadError(f"sliding window {window}, expected at least 1 token")
