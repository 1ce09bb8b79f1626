"""Rotary position tables for every kind of frequency scaling that a model may ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.model.config import ModelConfig, RopeScaling

ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn")


def rope_table(config: ModelConfig, num_positions: int) -> Tensor:
    """Cosines and sines, float32 [num_positions, 2, head_dim / 2].

    Angles are rounded to float32 as the models were trained with; at far positions that is visible in the logits.
    Raises ValueError for an unknown kind of scaling.
    """
    scaling = config.rope_scaling
    positions = torch.arange(num_positions, dtype=torch.float32)
    if scaling is not None and scaling.kind == "dynamic":
        frequencies = _dynamic(config, scaling, num_positions)
    else:
        frequencies = _frequencies(config, scaling)[None, :]
    angles = positions[:, None] * frequencies
    factor = _attention_factor(scaling)
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1).contiguous()


def _powers(base: float | Tensor, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return base**exponents


def _frequencies(config: ModelConfig, scaling: RopeScaling | None) -> Tensor:
    """Inverse frequencies, float32 [head_dim / 2], the same for every position."""
    frequencies = 1.0 / _powers(config.rope_theta, config.head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(config, scaling)
    raise ValueError(f"unknown rope scaling {scaling.kind!r}, allowed: {', '.join(ROPE_KINDS)}")


def _dynamic(config: ModelConfig, scaling: RopeScaling, num_positions: int) -> Tensor:
    """NTK-aware scaling (public formula by bloc97 and emozilla), float32 [num_positions, head_dim / 2].

    The base grows with the length. Here a position's base is that of the sequence which ends at it: a pure function
    of the position, as in token-by-token generation, so that chunking and recomputing cannot change a key.
    """
    original, dim = scaling.original_max_positions, config.head_dim
    lengths = torch.arange(1, num_positions + 1, dtype=torch.float32).clamp(min=original)
    stretch = (scaling.factor * lengths / original - (scaling.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _powers((config.rope_theta * stretch)[:, None], dim)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between are blended (Llama 3.1's published formula)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = (scaling.original_max_positions / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > scaling.original_max_positions / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < scaling.original_max_positions / high, frequencies, stretched)


def _yarn(config: ModelConfig, scaling: RopeScaling) -> Tensor:
    """NTK-by-parts interpolation (arXiv 2309.00071)."""
    dim, theta = config.head_dim, config.rope_theta

    def correction(rotations: float) -> float:
        return dim * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = float(min(math.ceil(correction(scaling.beta_slow)), dim - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(theta, dim)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _attention_factor(scaling: RopeScaling | None) -> float:
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0
