"""Compiles kernels to plain addresses, each once per model dtype, and keeps the machine code on disk.

Compiled functions call each other through these addresses instead of being inlined: what is compiled once is never
compiled again as a part of something else, which is what start-up time is made of.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import torch
from llvmlite import ir
from numba.core import config, types

from worker.kernels.cpu.simd import I64, instruction

_TAGS = {torch.float32: types.float32, torch.bfloat16: types.uint16}
_kept: list[object] = []  # machine code lives as long as its owner


@functools.cache
def compiled(function: Callable[..., Any], dtype: torch.dtype, num_args: int = 4) -> int:
    """The address of `void function(tag, int64...)`, compiled for this machine; the tag's type stands for the dtype."""
    signature = types.void(_TAGS[dtype], *[types.int64] * num_args)
    owner: Any = numba.cfunc(signature, cache=_use_cache(), error_model="numpy")(function)
    _kept.append(owner)
    return int(owner.address)


@functools.cache
def _use_cache() -> bool:
    """Points numba at a folder of the user's cache, named after the sources, so that none is ever stale."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return True
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "tidegate" / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    if not os.access(folder, os.W_OK):
        return False
    settings: Any = config
    settings.CACHE_DIR = str(folder)
    return True


def _int64s(count: int) -> Any:
    make: Any = types.UniTuple
    return make(types.int64, count)


def _caller(name: str, num_args: int) -> Any:
    """An instruction that calls the function at an address."""

    def typed(typingctx: Any, tag: Any, address: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            kind = ir.FunctionType(ir.VoidType(), [values[0].type] + [I64] * num_args)
            arguments = [builder.extract_value(values[2], i) for i in range(num_args)]
            builder.call(builder.inttoptr(values[1], kind.as_pointer()), [values[0], *arguments])
            return context.get_dummy_value()

        return types.void(tag, types.int64, _int64s(num_args)), codegen

    typed.__name__ = name
    return instruction(typed)


call_kernel = _caller("call_kernel", 4)
call_tile = _caller("call_tile", 8)
call_paged_tile = _caller("call_paged_tile", 10)
