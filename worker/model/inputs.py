"""Turns a batch into the flat tables the kernels read; what a request keeps over steps stays in its slot's row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.window import Windows
from worker.engine.batch import Batch
from worker.engine.request import Request
from worker.kernels import StepSizes, StepTables


class StepInputs:
    """Owns the step tables, one for each group of layers, and fills them.

    Block tables are kept per slot and only grow by the blocks that are new since the slot's last step; a request that
    is new in its slot, or was admitted again, starts with an empty row.
    """

    def __init__(
        self, max_num_seqs: int, max_tokens: int, max_blocks: int, block_size: int, windows: Windows = (None,)
    ) -> None:
        """`windows`: what the layers of each group see of a request that has no windows of its own."""
        self._windows = windows
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._owners: list[Request | None] = [None] * max_num_seqs
        self._admissions = [0] * max_num_seqs
        self._num_entries = [0] * max_num_seqs  # of the owners' block ids, those that are in the tables
        first = StepTables(
            token_ids=_table(max_tokens),
            positions=_table(max_tokens),
            slots=_table(max_tokens),
            query_starts=_table(max_num_seqs + 1),
            seq_lens=_table(max_num_seqs),
            table_rows=_table(max_num_seqs),
            block_tables=_table(max_num_seqs, max_blocks),
            sample_tokens=_table(max_num_seqs),
            windows=_table(max_num_seqs),
            sinks=_table(max_num_seqs),
        )
        others = (
            replace(
                first,
                slots=_table(max_tokens),
                block_tables=_table(max_num_seqs, max_blocks),
                windows=_table(max_num_seqs),
                sinks=_table(max_num_seqs),
            )
            for _ in windows[1:]
        )
        self.tables = (first, *others)
        self._token_ids = first.token_ids.numpy()
        self._positions = first.positions.numpy()
        self._query_starts = first.query_starts.numpy()
        self._seq_lens = first.seq_lens.numpy()
        self._table_rows = first.table_rows.numpy()
        self._sample_tokens = first.sample_tokens.numpy()
        self._slots = [tables.slots.numpy() for tables in self.tables]
        self._block_tables = [tables.block_tables.numpy() for tables in self.tables]
        self._row_windows = [(tables.windows.numpy(), tables.sinks.numpy()) for tables in self.tables]
        self._slot_windows = np.zeros((len(windows), 2, max_num_seqs), np.int32)  # (tokens, sinks) of the owners

    def prepare(self, batch: Batch) -> StepSizes:
        """Fills the tables for a batch.

        Raises ValueError if the batch is larger than the tables, or a row has no tokens or no blocks for them.
        """
        num_rows = len(batch.rows)
        if num_rows > len(self._owners):
            raise ValueError(f"batch has {num_rows} rows, at most {len(self._owners)} are allowed")
        tokens: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        rows: list[int] = []
        samples: list[int] = []
        for row in batch.rows:
            request, start, count = row.request, row.request.num_computed, row.num_new
            self._check(request, start, count)
            self._refresh(request)
            if count == 1:
                tokens.append(request.token_ids[start])
            else:
                tokens.extend(request.token_ids[start : start + count])
            starts.append(start)
            counts.append(count)
            rows.append(request.slot)
            if row.samples:
                samples.append(len(tokens) - 1)
        num_tokens = len(tokens)
        if num_tokens > self._max_tokens:
            raise ValueError(f"batch has {num_tokens} tokens, at most {self._max_tokens} are allowed")
        self._fill(tokens, np.array(starts, np.int32), np.array(counts, np.int32), np.array(rows, np.int32))
        self._sample_tokens[: len(samples)] = samples
        return StepSizes(num_tokens, num_rows, len(samples))

    def _check(self, request: Request, start: int, count: int) -> None:
        if not 0 <= request.slot < len(self._owners):
            raise ValueError(
                f"request {request.request_id} has slot {request.slot}, allowed: 0..{len(self._owners) - 1}"
            )
        if count < 1 or start + count > request.num_tokens:
            raise ValueError(
                f"request {request.request_id} has {request.num_tokens} tokens, cannot compute {count} from {start}"
            )
        num_blocks = len(request.block_ids) // len(self._windows)
        if start + count > num_blocks * self._block_size:
            raise ValueError(
                f"request {request.request_id} needs room for {start + count} tokens, "
                f"its {num_blocks} blocks hold {num_blocks * self._block_size}"
            )
        if num_blocks > self._block_tables[0].shape[1]:
            raise ValueError(
                f"request {request.request_id} has {num_blocks} blocks, "
                f"at most {self._block_tables[0].shape[1]} are allowed"
            )

    def _refresh(self, request: Request) -> None:
        """Brings the slot's row of the block tables up to date."""
        slot = request.slot
        if self._owners[slot] is not request or self._admissions[slot] != request.admissions:
            self._owners[slot] = request
            self._admissions[slot] = request.admissions
            self._num_entries[slot] = 0
            for index, window in enumerate(request.windows or self._windows):
                self._slot_windows[index, :, slot] = (window.num_tokens, window.num_sinks) if window else (0, 0)
        known, total, step = self._num_entries[slot], len(request.block_ids), len(self._windows)
        if total > known:
            for index, table in enumerate(self._block_tables):
                table[slot, known // step : total // step] = request.block_ids[known + index :: step]
            self._num_entries[slot] = total

    def _fill(
        self, tokens: list[int], starts: NDArray[np.int32], counts: NDArray[np.int32], rows: NDArray[np.int32]
    ) -> None:
        num_tokens, num_rows = len(tokens), len(rows)
        ends = np.cumsum(counts, dtype=np.int32)
        self._token_ids[:num_tokens] = tokens
        self._query_starts[1 : num_rows + 1] = ends
        self._seq_lens[:num_rows] = starts + counts
        self._table_rows[:num_rows] = rows
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
        self._positions[:num_tokens] = positions
        owners, indices, offsets = (
            np.repeat(rows, counts),
            positions // self._block_size,
            positions % self._block_size,
        )
        for table, slots in zip(self._block_tables, self._slots, strict=True):
            slots[:num_tokens] = table[owners, indices] * self._block_size + offsets
        for (windows, sinks), of_slots in zip(self._row_windows, self._slot_windows, strict=True):
            windows[:num_rows], sinks[:num_rows] = of_slots[:, rows]


def _table(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
