"""The step tables say what the batch says, and a slot's row follows its request."""

from __future__ import annotations

import pytest

from common.types import Band, SamplingParams
from common.window import Window, Windows
from worker.engine.batch import Batch, BatchRow
from worker.engine.request import Request
from worker.kernels import StepSizes
from worker.model.inputs import StepInputs


def make_request(name: str, num_tokens: int, slot: int, blocks: list[int]) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=8)
    tokens = [100 * (slot + 1) + i for i in range(num_tokens)]
    return Request(name, 0, 0, tokens, num_tokens, sampling, Band.NORMAL, "", 0, block_ids=blocks, slot=slot)


def make_inputs(windows: Windows = (None,)) -> StepInputs:
    return StepInputs(max_num_seqs=4, max_tokens=16, max_blocks=3, block_size=8, windows=windows)


def test_decode_and_chunk_in_one_step() -> None:
    inputs = make_inputs()
    decode, chunk = make_request("a", 10, 2, [5, 7]), make_request("b", 20, 0, [1, 2, 3])
    decode.num_computed, chunk.num_computed = 9, 6
    assert inputs.prepare(Batch((BatchRow(decode, 1), BatchRow(chunk, 4)))) == StepSizes(5, 2, 1)
    [tables] = inputs.tables
    assert tables.token_ids[:5].tolist() == [309, 106, 107, 108, 109]
    assert tables.positions[:5].tolist() == [9, 6, 7, 8, 9]
    assert tables.slots[:5].tolist() == [7 * 8 + 1, 1 * 8 + 6, 1 * 8 + 7, 2 * 8, 2 * 8 + 1]
    assert tables.query_starts[:3].tolist() == [0, 1, 5]
    assert tables.seq_lens[:2].tolist() == [10, 10]
    assert tables.table_rows[:2].tolist() == [2, 0]
    assert tables.block_tables[0].tolist() == [1, 2, 3]
    assert tables.sample_tokens[:1].tolist() == [0]


def test_a_slot_forgets_its_last_request_and_its_last_admission() -> None:
    inputs = make_inputs()
    first = make_request("a", 17, 1, [1, 2, 3])
    inputs.prepare(Batch((BatchRow(first, 1),)))
    second = make_request("b", 9, 1, [8, 9])
    inputs.prepare(Batch((BatchRow(second, 9),)))
    assert inputs.tables[0].block_tables[1, :2].tolist() == [8, 9]
    second.admissions += 1
    second.block_ids = [4, 5]
    inputs.prepare(Batch((BatchRow(second, 9),)))
    assert inputs.tables[0].block_tables[1, :2].tolist() == [4, 5]
    second.block_ids.append(6)
    inputs.prepare(Batch((BatchRow(second, 9),)))
    assert inputs.tables[0].block_tables[1].tolist() == [4, 5, 6]


def test_groups_of_layers_have_tables_and_windows_of_their_own() -> None:
    inputs = make_inputs((None, Window(20)))
    own, narrow = make_request("a", 9, 1, [1, 2, 3, 4]), make_request("b", 9, 3, [5, 6, 7, 8])
    own.num_computed = narrow.num_computed = 8
    narrow.windows = (Window(10, 4), Window(10, 4))
    inputs.prepare(Batch((BatchRow(own, 1), BatchRow(narrow, 1))))
    everything, local = inputs.tables
    assert everything.block_tables[[1, 3], :2].tolist() == [[1, 3], [5, 7]]
    assert local.block_tables[[1, 3], :2].tolist() == [[2, 4], [6, 8]]
    assert (everything.slots[:2].tolist(), local.slots[:2].tolist()) == ([3 * 8, 7 * 8], [4 * 8, 8 * 8])
    assert (everything.windows[:2].tolist(), everything.sinks[:2].tolist()) == ([0, 10], [0, 4])
    assert (local.windows[:2].tolist(), local.sinks[:2].tolist()) == ([20, 10], [0, 4])
    own.block_ids += [9, 10]
    inputs.prepare(Batch((BatchRow(own, 1),)))
    assert everything.block_tables[1].tolist() == [1, 3, 9]
    assert local.block_tables[1].tolist() == [2, 4, 10]
    assert everything.token_ids is local.token_ids


def test_what_cannot_be_computed_is_refused() -> None:
    inputs = make_inputs()
    with pytest.raises(ValueError, match="slot -1"):
        inputs.prepare(Batch((BatchRow(make_request("a", 3, -1, [1]), 1),)))
    with pytest.raises(ValueError, match="cannot compute 4 from 0"):
        inputs.prepare(Batch((BatchRow(make_request("a", 3, 0, [1]), 4),)))
    with pytest.raises(ValueError, match="1 blocks hold 8"):
        inputs.prepare(Batch((BatchRow(make_request("a", 9, 0, [1]), 9),)))
    with pytest.raises(ValueError, match="at most 3"):
        inputs.prepare(Batch((BatchRow(make_request("a", 9, 0, [1, 2, 3, 4]), 9),)))
    with pytest.raises(ValueError, match="at most 16"):
        inputs.prepare(Batch((BatchRow(make_request("a", 20, 0, [1, 2, 3]), 20),)))
    with pytest.raises(ValueError, match="5 rows"):
        inputs.prepare(Batch(tuple(BatchRow(make_request("a", 1, 0, [1]), 1) for _ in range(5))))
