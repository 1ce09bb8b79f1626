"""Memory for compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

_CACHE_LINE = 64


def aligned_zeros(num_bytes: int) -> Tensor:
    """Zeroed bytes, uint8, that start at a cache line."""
    raw = torch.zeros(num_bytes + _CACHE_LINE, dtype=torch.uint8)
    skip = -raw.data_ptr() % _CACHE_LINE
    return raw[skip : skip + num_bytes]
