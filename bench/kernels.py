"""Times the kernels and whole steps of one model shape, with random weights: `python -m bench.kernels`."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from common.types import Band, SamplingParams
from worker.cache.storage import KVLayout
from worker.engine.batch import Batch, BatchRow, SampledToken
from worker.engine.request import Request
from worker.kernels import (
    BACKENDS,
    AttentionShape,
    Backend,
    Epilogue,
    LayerCache,
    Program,
    StepSizes,
    StepTables,
    load_backend,
)
from worker.model.config import ModelConfig
from worker.model.runner import ModelRunner

SHAPE = ModelConfig(
    name="135M",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    tie_embeddings=True,
)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
BLOCK_SIZE = 16
ROWS = (1, 8, 32, 64, 1024)
CONTEXTS = ((1, 2048), (32, 128), (32, 512))


class FirstToken:
    """Samples token 0, so that a step's time is the model's alone."""

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        return [SampledToken(0)] * len(requests)


def best(run: Callable[[], object], seconds: float) -> float:
    """The shortest time of a call, in seconds, over about `seconds`; the first call does not count."""
    run()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"q": (heads, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    tensors = {"embed": torch.randn(config.vocab_size, hidden), "norm": torch.ones(hidden)}
    for i in range(config.num_layers):
        tensors |= {f"layers.{i}.{name}": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        tensors |= {f"layers.{i}.{name}_norm": torch.ones(hidden) for name in ("attn", "mlp")}
    return tensors


def paged_tables(rows: Iterable[tuple[int, int]]) -> StepTables:
    """Tables of sequences (new tokens, length) over consecutive blocks."""
    rows = list(rows)
    counts = [-(-length // BLOCK_SIZE) for _, length in rows]
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    first = 0
    for row, (new, length) in enumerate(rows):
        tables[row, : counts[row]] = torch.arange(first, first + counts[row])
        positions.extend(range(length - new, length))
        slots.extend(range(first * BLOCK_SIZE + length - new, first * BLOCK_SIZE + length))
        first += counts[row]
    return StepTables(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        query_starts=torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in rows], dtype=torch.int32),
        table_rows=torch.arange(len(rows), dtype=torch.int32),
        block_tables=tables,
        sample_tokens=torch.zeros(len(rows), dtype=torch.int32),
        windows=torch.zeros(len(rows), dtype=torch.int32),
        sinks=torch.zeros(len(rows), dtype=torch.int32),
    )


class KernelBench:
    """Times each kind of kernel by itself, over as many layers as the model has."""

    def __init__(self, backend: Backend, dtype: torch.dtype, threads: int, seconds: float) -> None:
        self._backend, self._dtype, self._threads, self._seconds = backend, dtype, threads, seconds

    def _time(self, record: Callable[[Program, int], None], sizes: StepSizes) -> float:
        program = self._backend.program(self._dtype, self._threads)
        for layer in range(SHAPE.num_layers):
            record(program, layer)
        elapsed = best(lambda: program.run(sizes), self._seconds)
        program.close()
        return elapsed

    def linears(self) -> None:
        hidden, inner, dtype = SHAPE.hidden_size, SHAPE.intermediate_size, self._dtype
        qkv = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
        pack, pack_gated = self._backend.pack, self._backend.pack_gated
        layers = [
            (
                pack([torch.randn(qkv, hidden)], [None], dtype),
                pack([torch.randn(hidden, hidden)], [None], dtype),
                pack_gated(torch.randn(inner, hidden), torch.randn(inner, hidden), dtype),
                pack([torch.randn(hidden, inner)], [None], dtype),
            )
            for _ in range(SHAPE.num_layers)
        ]
        x, residual = torch.randn(max(ROWS), hidden).to(dtype), torch.zeros(max(ROWS), hidden)
        wide, inner_x = torch.zeros(max(ROWS), qkv), torch.randn(max(ROWS), inner).to(dtype)

        def record(program: Program, layer: int) -> None:
            q, o, gated, down = layers[layer]
            program.linear(x, q, wide)
            program.linear(x, o, residual, epilogue=Epilogue.ADD)
            program.linear(x, gated, inner_x, epilogue=Epilogue.GATE)
            program.linear(inner_x, down, residual, epilogue=Epilogue.ADD)

        weights = SHAPE.num_layers * (qkv * hidden + hidden * hidden + 3 * inner * hidden)
        for rows in ROWS:
            elapsed = self._time(record, StepSizes(rows, 1, 0))
            rate, bandwidth = 2 * rows * weights / elapsed / 1e9, weights * dtype.itemsize / elapsed / 1e9
            print(f"linears    {rows:5d} rows {elapsed * 1e3:9.2f} ms  {rate:6.0f} GFLOP/s {bandwidth:6.1f} GB/s")

    def attention(self) -> None:
        cases = [[(1, length)] * count for count, length in CONTEXTS] + [[(1024, 1024)], [(512, 1536)]]
        for rows in cases:
            tables = paged_tables(rows)
            layout = KVLayout.of(SHAPE, BLOCK_SIZE, self._dtype)
            pack, blocks = 4 // self._dtype.itemsize, int(tables.block_tables.max()) + 1
            caches = torch.randn(blocks, layout.block_elements).to(self._dtype).view(blocks, layout.num_layers, 2, -1)
            self._attend(rows, tables, caches, pack)

    def _attend(self, rows: list[tuple[int, int]], tables: StepTables, caches: Tensor, pack: int) -> None:
        shape = AttentionShape(SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim, BLOCK_SIZE, SHAPE.head_dim**-0.5)
        q = torch.randn(len(tables.positions), SHAPE.num_heads * SHAPE.head_dim).to(self._dtype)
        out = torch.zeros_like(q)
        heads, dim = SHAPE.num_kv_heads, SHAPE.head_dim

        def record(program: Program, layer: int) -> None:
            keys = caches[:, layer, 0].view(len(caches), heads, dim // pack, BLOCK_SIZE, pack)
            values = caches[:, layer, 1].view(len(caches), heads, BLOCK_SIZE // pack, dim, pack)
            program.attention(q, tables, shape, LayerCache(keys, values), out)

        elapsed = self._time(record, StepSizes(len(q), len(rows), 0))
        seen = sum(sum(range(length - new + 1, length + 1)) for new, length in rows)
        rate = 4 * seen * SHAPE.num_layers * SHAPE.num_heads * dim / elapsed / 1e9
        read = sum(length for _, length in rows) * SHAPE.num_layers * 2 * heads * dim * self._dtype.itemsize
        (new, length), count = rows[0], len(rows)
        print(
            f"attention  {count:3d} x {new:4d} of {length:4d} {elapsed * 1e3:9.2f} ms  {rate:6.0f} GFLOP/s "
            f"{read / elapsed / 1e9:6.1f} GB/s"
        )


def make_request(slot: int, num_tokens: int, blocks: range) -> Request:
    tokens = torch.randint(0, SHAPE.vocab_size, (num_tokens,)).tolist()
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    return Request(str(slot), 0, 0, tokens, num_tokens, sampling, Band.NORMAL, "", 0, block_ids=list(blocks), slot=slot)


def time_steps(runner: ModelRunner, seconds: float) -> None:
    """Whole steps through the runner: inputs, forward pass, a sampler that does nothing."""
    for count in (1, 8, 32, 64):
        requests = [make_request(slot, 96, range(slot * 6, slot * 6 + 6)) for slot in range(count)]
        for request in requests:
            runner.execute(Batch((BatchRow(request, 95),)))
            request.num_computed = 95
        batch = Batch(tuple(BatchRow(request, 1) for request in requests))
        elapsed = best(functools.partial(runner.execute, batch), seconds)
        print(f"decode     {count:5d} rows {elapsed * 1e3:9.2f} ms  {count / elapsed:6.0f} tokens/s")
    for length in (256, 1024):
        batch = Batch((BatchRow(make_request(0, length, range(length // BLOCK_SIZE)), length),))
        elapsed = best(functools.partial(runner.execute, batch), seconds)
        print(f"prefill    {length:5d} rows {elapsed * 1e3:9.2f} ms  {length / elapsed:6.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each line")
    arguments = parser.parse_args()
    backend, dtype = load_backend(arguments.backend), DTYPES[arguments.dtype]
    kernels = KernelBench(backend, dtype, arguments.threads, arguments.seconds)
    kernels.linears()
    kernels.attention()
    start = time.perf_counter()
    runner = ModelRunner(
        SHAPE,
        random_weights(SHAPE),
        backend=backend,
        dtype=dtype,
        num_blocks=512,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        sampler=FirstToken(),
        num_threads=arguments.threads,
    )
    built = time.perf_counter()
    runner.warm_up()
    print(f"packing {built - start:.2f} s, compiling or loading kernels {time.perf_counter() - built:.2f} s")
    time_steps(runner, arguments.seconds)
    runner.close()


if __name__ == "__main__":
    main()
