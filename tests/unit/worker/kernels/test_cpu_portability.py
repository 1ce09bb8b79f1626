"""The same kernels on a processor without wide vectors, fused products or bfloat16, as LLVM compiles for it."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from worker.kernels import *
from worker.cache.storage import KVLayout, KVStorage
from worker.kernels.cpu.tile import MAX_ROWS

assert MAX_ROWS == 3
torch.manual_seed(0)
int32 = dict(dtype=torch.int32)
tables = StepTables(
    torch.zeros(7, **int32), torch.arange(13, 20, **int32), torch.arange(13, 20, **int32),
    torch.tensor([0, 7], **int32), torch.tensor([20], **int32),
    torch.zeros(1, **int32), torch.tensor([[0, 1, 2]], **int32), torch.zeros(1, **int32),
    torch.zeros(1, **int32), torch.zeros(1, **int32),
)
shape = AttentionShape(4, 2, 24, 8, 0.2)
x, matrix = torch.randn(7, 50).bfloat16(), torch.randn(shape.qkv_width, 50)
rope = torch.randn(20, 2, 12)
storage = KVStorage(KVLayout(1, 2, 24, 8, torch.bfloat16), 3)
for part in (storage.layer(0).keys, storage.layer(0).values):
    part.normal_()
results = []
for name in ("cpu", "reference"):
    backend = load_backend(name)
    program = backend.program(torch.bfloat16, 2)
    qkv = torch.zeros(7, shape.qkv_width)
    q, out = torch.zeros(7, 96, dtype=torch.bfloat16), torch.zeros(7, 96, dtype=torch.bfloat16)
    program.linear(x, backend.pack([matrix], [None], torch.bfloat16), qkv)
    program.rope_store(qkv, rope, tables, shape, storage.layer(0), q, None, None, 1e-5)
    program.attention(q, tables, shape, storage.layer(0), out)
    program.run(StepSizes(7, 1, 1))
    program.close()
    results.append(out.float())
difference = float((results[0] - results[1]).abs().max() / results[1].abs().max())
assert difference < 2e-2, difference
"""


def test_kernels_without_wide_vectors() -> None:
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
