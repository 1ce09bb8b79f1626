"""The CPU kernels compute what the reference computes, for any shape, and each row from itself alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.cache.storage import KVLayout, KVStorage
from worker.kernels import AttentionShape, Epilogue, LayerCache, Program, Rows, StepSizes, StepTables, load_backend

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
CPU, REFERENCE = load_backend("cpu"), load_backend("reference")


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(program: Program, tokens: int, rows: int = 1, samples: int = 0) -> None:
    program.run(StepSizes(tokens, rows, samples))
    program.close()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    scale = max(1.0, float(want.abs().max()))
    assert float((got.float() - want.float()).abs().max()) <= TOLERANCE[dtype] * scale


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40),
    columns=st.integers(1, 48).map(lambda n: 2 * n),
    out_features=st.integers(1, 100),
    epilogue=st.sampled_from(Epilogue),
    bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_linear(
    dtype: torch.dtype, rows: int, columns: int, out_features: int, epilogue: Epilogue, bias: bool, threads: int
) -> None:
    random = generator(rows * columns)
    x = torch.randn(rows + 2, columns, generator=random).to(dtype)
    matrices = [torch.randn(out_features, columns, generator=random) for _ in range(2)]
    biases: list[Tensor | None] = [torch.randn(out_features, generator=random) if bias else None, None]
    width = out_features if epilogue.is_gated else 2 * out_features
    out_dtype = torch.float32 if epilogue is Epilogue.ADD else dtype
    results = []
    for backend in (CPU, REFERENCE):
        out = torch.ones(rows + 2, width, dtype=out_dtype)
        if epilogue.is_gated:
            weight = backend.pack_gated(matrices[0], matrices[1], dtype)
        else:
            weight = backend.pack(matrices, biases, dtype)
        program = backend.program(dtype, threads)
        program.linear(x, weight, out, epilogue=epilogue)
        run(program, rows)
        results.append(out)
    assert_near(results[0], results[1], dtype)
    assert (results[0][rows:] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_row_does_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    x = torch.randn(37, 64, generator=generator(1)).to(dtype)
    weight = CPU.pack([torch.randn(50, 64, generator=generator(2))], [None], dtype)
    together, alone, one = torch.zeros(37, 50), torch.zeros(37, 50), torch.zeros(1, 50)
    program = CPU.program(dtype, 2)
    program.linear(x, weight, together)
    run(program, 37)
    for row in range(37):
        single = CPU.program(dtype, 1)
        single.linear(x[row : row + 1].clone(), weight, one)
        run(single, 1)
        alone[row] = one[0]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "scale"), [(16, 1.0), (20, 7.25), (96, 0.5)])
def test_rms_norm_embedding_and_sample_rows(dtype: torch.dtype, width: int, scale: float) -> None:
    table, weight = torch.randn(70, width, generator=generator(3)), torch.randn(width, generator=generator(4))
    token_ids = torch.tensor([69, 0, 31, 32, 33, 5], dtype=torch.int32)
    index = torch.tensor([4, 0, 2], dtype=torch.int32)
    results = []
    for backend in (CPU, REFERENCE):
        hidden, normed = torch.zeros(6, width), torch.zeros(6, width, dtype=dtype)
        last = torch.zeros(3, width, dtype=dtype)
        program = backend.program(dtype, 2)
        program.embed(token_ids, backend.pack([table], [None], dtype), hidden, scale)
        program.rms_norm(hidden, weight, 1e-5, normed)
        program.rms_norm_rows(hidden, index, weight, 1e-5, last)
        summed = torch.ones(6, width)
        program.add_rms_norm(hidden, weight, 1e-5, summed)
        run(program, 5, samples=3)
        results.append((hidden, normed, last, summed))
    assert torch.equal(results[0][0], results[1][0])
    assert_near(results[0][3], results[1][3], torch.float32)
    assert (results[0][3][5] == 1).all()
    assert_near(results[0][1], results[1][1], dtype)
    assert_near(results[0][2], results[1][2], dtype)
    assert torch.equal(results[0][2][1], results[0][1][0])


@dataclass(frozen=True)
class Case:
    """Sequences in a paged cache: (new tokens, length) of each, and (window, sinks) if they have any."""

    sequences: tuple[tuple[int, int], ...]
    shape: AttentionShape
    dtype: torch.dtype
    seed: int
    windows: tuple[tuple[int, int], ...] = ()

    def storage(self) -> KVStorage:
        layout = KVLayout(1, self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size, self.dtype)
        blocks = sum(-(-length // self.shape.block_size) for _, length in self.sequences)
        storage = KVStorage(layout, blocks + 1)
        for part in (storage.layer(0).keys, storage.layer(0).values):
            part.copy_(torch.randn(part.shape, generator=generator(self.seed)))
            part[0] = torch.nan  # nobody may read the null block
        return storage

    def tables(self) -> StepTables:
        size = self.shape.block_size
        counts = [-(-length // size) for _, length in self.sequences]
        order = (torch.randperm(sum(counts), generator=generator(self.seed)) + 1).tolist()
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        positions: list[int] = []
        slots: list[int] = []
        for row, (new, length) in enumerate(self.sequences):
            mine = [order.pop() for _ in range(counts[row])]
            tables[row, : counts[row]] = torch.tensor(mine)
            window, sinks = self.windows[row] if self.windows else (0, 0)
            if window:  # nobody sees these any more: their blocks are somebody else's
                oldest = max(0, length - new - window + 1)
                tables[row, -(-sinks // size) : oldest // size] = 0
            span = range(length - new, length)
            positions.extend(span)
            slots.extend(mine[p // size] * size + p % size for p in span)
        starts = [0]
        for new, _ in self.sequences:
            starts.append(starts[-1] + new)
        rows = len(self.sequences)
        windows = torch.tensor(self.windows or [(0, 0)] * rows, dtype=torch.int32)
        return StepTables(
            token_ids=torch.zeros(len(positions), dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.tensor(slots, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([length for _, length in self.sequences], dtype=torch.int32),
            # The rows of the block table are in an order of their own.
            table_rows=torch.arange(rows, dtype=torch.int32).flip(0),
            block_tables=tables.flip(0).contiguous(),
            sample_tokens=torch.zeros(rows, dtype=torch.int32),
            windows=windows[:, 0].contiguous(),
            sinks=windows[:, 1].contiguous(),
        )

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.sequences)


def attend(case: Case, backend_name: str, cache: LayerCache, tables: StepTables, q: Tensor, threads: int = 2) -> Tensor:
    out = torch.zeros_like(q)
    program = load_backend(backend_name).program(case.dtype, threads)
    program.attention(q, tables, case.shape, cache, out)
    run(program, case.num_tokens, len(case.sequences))
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([8, 16, 24, 32, 40, 64]))
    near_edges = st.tuples(st.sampled_from([block_size, 128, 256]), st.integers(0, 3), st.integers(-1, 1))
    length = st.one_of(st.integers(1, 300), near_edges.map(lambda e: max(1, e[0] * e[1] + e[2])))
    sequences = []
    for _ in range(draw(st.integers(1, 4))):
        total = draw(length)
        new = draw(st.one_of(st.just(1), st.integers(1, total)))
        sequences.append((new, total))
    kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([16, 24, 40, 64, 128, 256]))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 16]))
    sinks = st.sampled_from([0, 0, 1, 4, 16, 100, 127, 128, 129, 200])
    window = st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 310), sinks))
    windows = tuple(draw(window) for _ in sequences)  # each row has its own
    shape = AttentionShape(kv_heads * group, kv_heads, head_dim, block_size, head_dim**-0.5)
    return Case(tuple(sequences), shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)), windows)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_attention(case: Case) -> None:
    cache, tables = case.storage().layer(0), case.tables()
    shape = (case.num_tokens, case.shape.num_heads * case.shape.head_dim)
    q = torch.randn(shape, generator=generator(case.seed)).to(case.dtype)
    got, want = (attend(case, name, cache, tables, q) for name in ("cpu", "reference"))
    assert_near(got, want, case.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (100, 0), (100, 4), (90, 140)])
def test_attention_of_a_token_is_the_same_in_a_chunk_alone_and_split(
    dtype: torch.dtype, window: int, sinks: int
) -> None:
    shape = AttentionShape(6, 2, 32, 16, 32**-0.5)
    case = Case(((300, 700),), shape, dtype, 5, ((window, sinks),))
    cache, tables = case.storage().layer(0), case.tables()
    q = torch.randn(300, 6 * 32, generator=generator(6)).to(dtype)
    whole = attend(case, "cpu", cache, tables, q)
    for token in (0, 1, 111, 112, 299):
        length = 400 + token + 1
        single = Case(((1, length),), shape, dtype, 5, case.windows)
        step = StepTables(
            tables.token_ids, tables.positions, tables.slots, torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32), tables.table_rows, tables.block_tables, tables.sample_tokens,
            tables.windows, tables.sinks,
        )  # fmt: skip
        for threads in (1, 3):
            alone = attend(single, "cpu", cache, step, q[token : token + 1].clone(), threads)
            assert torch.equal(alone[0], whole[token])


@settings(max_examples=25, deadline=None)
@given(case=cases(), norm=st.booleans())
def test_rope_store(case: Case, norm: bool) -> None:
    tables, shape = case.tables(), case.shape
    random = generator(case.seed + 1)
    qkv = torch.randn(case.num_tokens, shape.qkv_width, generator=random)
    rope = torch.randn(int(tables.seq_lens.max()), 2, shape.head_dim // 2, generator=random)
    norms = [torch.rand(shape.head_dim, generator=random) for _ in range(2)] if norm else [None, None]
    results = []
    for backend in (CPU, REFERENCE):
        cache = case.storage().layer(0)
        q_out = torch.zeros(case.num_tokens, shape.num_heads * shape.head_dim, dtype=case.dtype)
        program = backend.program(case.dtype, 2)
        program.rope_store(qkv, rope, tables, shape, cache, q_out, norms[0], norms[1], 1e-5)
        run(program, case.num_tokens, len(case.sequences))
        blocks, offsets = tables.slots.long() // shape.block_size, tables.slots.long() % shape.block_size
        pack = cache.keys.shape[-1]
        keys = cache.keys[blocks, :, :, offsets]
        values = cache.values[blocks, :, offsets // pack, :, offsets % pack]
        results.append((q_out, keys, values))
    for got, want in zip(results[0], results[1], strict=True):
        assert_near(got, want, case.dtype)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("sinks", [0, 1, 5, 16, 17, 130])
@pytest.mark.parametrize("length", [39, 40, 41, 128, 129, 300])
def test_a_window_equals_a_mask_over_everything(backend: str, sinks: int, length: int) -> None:
    """Lengths of one less than the window, the window, and more, up to tiles that are left out."""
    window, new, dim = 40, min(length, 50), 16
    shape = AttentionShape(2, 1, dim, 8, 0.25)
    case = Case(((new, length),), shape, torch.float32, length, ((window, sinks),))
    cache, tables = case.storage().layer(0), case.tables()
    q = torch.randn(new, 2 * dim, generator=generator(1))
    got = attend(case, backend, cache, tables, q)
    whole = Case(case.sequences, shape, torch.float32, length).tables()
    blocks = whole.block_tables[0].long()  # without holes
    keys = cache.keys[blocks, 0, :, :, 0].permute(0, 2, 1).reshape(-1, dim)[:length]
    values = cache.values[blocks, 0].reshape(-1, dim)[:length]
    position, key = torch.arange(length - new, length)[:, None], torch.arange(length)[None, :]
    mask = (key <= position) & ((position - key < window) | (key < sinks))
    scores = torch.einsum("qhd,kd->hqk", q.view(new, 2, dim), keys) * 0.25
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    assert_near(got, torch.einsum("hqk,kd->qhd", weights, values).reshape(new, -1), torch.float32)


def test_what_a_block_held_before_never_matters() -> None:
    shape = AttentionShape(2, 1, 16, 16, 0.25)
    case = Case(((5, 5),), shape, torch.bfloat16, 1)
    tables = case.tables()
    qkv = torch.randn(5, shape.qkv_width, generator=generator(1))
    rope = torch.randn(5, 2, 8, generator=generator(2))
    outs = []
    for garbage in (0.0, float("nan"), float("inf")):
        cache = case.storage().layer(0)
        cache.keys.fill_(garbage)
        cache.values.fill_(garbage)
        q, out = torch.zeros(5, 32, dtype=torch.bfloat16), torch.zeros(5, 32, dtype=torch.bfloat16)
        program = CPU.program(torch.bfloat16, 2)
        program.rope_store(qkv, rope, tables, shape, cache, q, None, None, 1e-5)
        program.attention(q, tables, shape, cache, out)
        run(program, 5)
        outs.append(out)
    assert torch.isfinite(outs[0]).all()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_threads_end_with_their_program() -> None:
    import threading

    before = set(threading.enumerate())

    def own() -> set[threading.Thread]:
        """Others' may end meanwhile."""
        return set(threading.enumerate()) - before

    x, out = torch.randn(4, 32), torch.zeros(4, 8)
    program = CPU.program(torch.float32, 3)
    program.linear(x, CPU.pack([torch.randn(8, 32)], [None], torch.float32), out, rows=Rows.TOKENS)
    program.run(StepSizes(4, 1, 0))
    assert len(own()) == 2
    program.close()
    assert not own()
    program.run(StepSizes(4, 1, 0))
    del program
    assert not own()


def test_wrong_operands_are_named() -> None:
    x, out = torch.randn(4, 32), torch.zeros(4, 8)
    weight = CPU.pack([torch.randn(8, 32)], [None], torch.float32)
    with pytest.raises(ValueError, match="takes 32"):
        CPU.program(torch.float32, 1).linear(x[:, :16], weight, out)
    with pytest.raises(ValueError, match="bfloat16"):
        CPU.program(torch.bfloat16, 1).linear(x, weight, out)
    with pytest.raises(TypeError, match="ReferenceLinear"):
        CPU.program(torch.float32, 1).linear(x, REFERENCE.pack([torch.randn(8, 32)], [None], torch.float32), out)
    with pytest.raises(ValueError, match="multiple of 2"):
        CPU.pack([torch.randn(8, 33)], [None], torch.bfloat16)
    with pytest.raises(ValueError, match="num_threads"):
        CPU.program(torch.float32, 0)
    with pytest.raises(ValueError, match="reference, cpu"):
        load_backend("gpu")


def test_layers_with_tables_of_their_own_in_one_program() -> None:
    """One kind of layer sees everything, the other a window, and their blocks are elsewhere."""
    shape = AttentionShape(4, 2, 16, 8, 0.25)
    sequences = ((5, 300), (1, 40), (17, 17))
    cases = [Case(sequences, shape, torch.float32, seed, windows) for seed, windows in ((1, ()), (2, ((30, 4),) * 3))]
    q = torch.randn(23, 64, generator=generator(1))
    parts = [(case, case.storage().layer(0), case.tables()) for case in (*cases, cases[0])]
    program, outs = CPU.program(torch.float32, 2), [torch.zeros_like(q) for _ in parts]
    for (_, cache, tables), out in zip(parts, outs, strict=True):
        program.attention(q, tables, shape, cache, out)
    run(program, 23, 3)
    for (case, cache, tables), out in zip(parts, outs, strict=True):
        assert_near(out, attend(case, "reference", cache, tables, q), torch.float32)
    assert not torch.allclose(outs[0], outs[1])
