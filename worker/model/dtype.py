"""Which number format a model runs in."""

from __future__ import annotations

import torch


def choose_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16`, or for `auto` bfloat16 where the CPU multiplies it in hardware, else float32.

    Raises ValueError for any other name.
    """
    if name == "auto":
        return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"dtype {name!r}, allowed: auto, {', '.join(dtypes)}")
    return dtypes[name]
