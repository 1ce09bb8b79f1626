"""An executor without a model: it remembers what each KV cell holds, and checks all that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from zlib import crc32

from common.window import Window, Windows
from worker.cache.host import Copy, CopyOrders
from worker.engine.batch import Batch, BatchRow, SampledToken
from worker.engine.request import Request, RequestState


def prefix_states(token_ids: Sequence[int], salt: str) -> list[int]:
    """For every position what its KV must hold: a number of the salt and of all tokens up to it."""
    state = crc32(salt.encode())
    states = []
    for token_id in token_ids:
        state = hash((state, token_id, 0x9E3779B9))
        states.append(state)
    return states


def next_token(state: int, vocab_size: int) -> int:
    """The "model": the token after a prefix with this state."""
    return hash((state, 0x51ED27)) % vocab_size


def generate(prompt: Sequence[int], num_tokens: int, *, vocab_size: int, salt: str = "") -> list[int]:
    """What any engine must generate after a prompt, if nothing ends it earlier."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(prefix_states(token_ids, salt)[-1], vocab_size))
    return token_ids[len(prompt) :]


class FakeCopier:
    """Copies a fake executor's blocks as late as allowed: a block that is overwritten too early is seen.

    What is to be copied beside steps is copied when it is awaited, or `delay` steps later.
    """

    def __init__(self, executor: FakeExecutor, num_slots: int, *, block_s: float = 1e-9, delay: int = 0) -> None:
        self.num_slots = num_slots
        self.block_s = block_s
        self.delay = delay
        self.orders: list[CopyOrders] = []
        self._executor = executor
        self._host: dict[int, list[int | None]] = {}
        self._aside: list[tuple[int, Copy]] = []  # steps until it is done

    def begin(self, orders: CopyOrders) -> None:
        self.orders.append(orders)
        for awaited in orders.awaited:
            entry = next((entry for entry in self._aside if entry[1] == awaited), None)
            if entry is not None:
                self._aside.remove(entry)
                self._save(awaited)
        pending = [copy.slot for _, copy in self._aside]
        assert not {copy.slot for copy in orders.saves} & set(pending), "a slot is written while it is being written"
        beside = [*pending, *(copy.slot for copy in orders.aside)]
        assert len(set(beside)) == len(beside), "two blocks are saved to one slot at once"
        for copy in orders.saves:
            self._save(copy)
        for copy in orders.loads:
            assert all(copy.slot != other.slot for _, other in self._aside), "a slot is read before it is written"
            self._executor.write_block(copy.block_id, self._host[copy.slot])
        self._aside += [(self.delay, copy) for copy in orders.aside]

    def finished(self, *, wait: bool) -> list[Copy]:
        done = [copy for left, copy in self._aside if wait or left <= 0]
        self._aside = [(left - 1, copy) for left, copy in self._aside if not wait and left > 0]
        for copy in done:
            self._save(copy)
        return done

    def _save(self, copy: Copy) -> None:
        self._host[copy.slot] = self._executor.read_block(copy.block_id)


class FakeExecutor:
    """Fails with AssertionError if a table is short, a cell holds another prefix's KV, or a shared block
    is written.

    `error`, if set, is raised once instead of the next step. `batches` keeps (request id, num_new) of every step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        max_num_seqs: int = 1 << 30,
        windows: Windows = (None,),
    ) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._windows = windows
        self._cells: dict[tuple[int, int], int] = {}
        self.error: Exception | None = None
        self.batches: list[list[tuple[str, int]]] = []

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block among them."""
        return self._num_blocks

    def execute(self, batch: Batch) -> list[SampledToken | None]:
        """Writes, then reads every cell that attention would read, then "samples"."""
        self._check_batch(batch)
        self.batches.append([(row.request.request_id, row.num_new) for row in batch.rows])
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        states = [prefix_states(row.request.token_ids, row.request.cache_salt) for row in batch.rows]
        for row, wanted in zip(batch.rows, states, strict=True):
            start = row.request.num_computed
            for position in range(start, start + row.num_new):
                for table in range(len(self._windows)):
                    self._cells[self._cell(row.request, position, table)] = wanted[position] ^ table
        sampled: list[SampledToken | None] = []
        for row, wanted in zip(batch.rows, states, strict=True):
            for table, window in enumerate(row.request.windows or self._windows):
                seen = self._seen(row, window)
                held = [self._cells.get(self._cell(row.request, position, table)) for position in seen]
                expected = [wanted[position] ^ table for position in seen]
                assert held == expected, f"{row.request.request_id} reads foreign KV in table {table}"
            sampled.append(SampledToken(next_token(wanted[-1], self._vocab_size)) if row.samples else None)
        return sampled

    def read_block(self, block_id: int) -> list[int | None]:
        """What the cells of a block hold."""
        return [self._cells.get((block_id, offset)) for offset in range(self._block_size)]

    def write_block(self, block_id: int, cells: list[int | None]) -> None:
        """Fills the cells of a block."""
        for offset, cell in enumerate(cells):
            self._cells.pop((block_id, offset), None)
            if cell is not None:
                self._cells[block_id, offset] = cell

    def _seen(self, row: BatchRow, window: Window | None) -> list[int]:
        """Positions that any token of the row attends to."""
        start, end = row.request.num_computed, row.request.num_computed + row.num_new
        if window is None:
            return list(range(end))
        oldest = max(0, start - window.num_tokens + 1)
        return [*range(min(oldest, window.num_sinks)), *range(oldest, end)]

    def _cell(self, request: Request, position: int, table: int) -> tuple[int, int]:
        place = position // self._block_size * len(self._windows) + table
        return request.block_ids[place], position % self._block_size

    def _check_batch(self, batch: Batch) -> None:
        requests = [row.request for row in batch.rows]
        assert len({id(request) for request in requests}) == len(requests), "a request has two rows"
        slots = {request.slot for request in requests}
        assert len(slots) == len(requests), "two requests share a slot"
        assert all(0 <= slot < self._max_num_seqs for slot in slots)
        in_tables = Counter(block_id for request in requests for block_id in request.block_ids if block_id)
        for row in batch.rows:
            assert row.request.state is RequestState.RUNNING
            assert row.num_new >= 1, "a row without progress"
            written = self._written(row)
            first = 0 if any(row.request.windows or self._windows) else 1  # holes are allowed where nobody looks
            assert all(first <= block_id < self._num_blocks for block_id in row.request.block_ids)
            assert all(in_tables[block_id] == 1 for block_id in written), "a shared block is written"

    def _written(self, row: BatchRow) -> set[int]:
        start, end = row.request.num_computed, row.request.num_computed + row.num_new
        assert end <= row.request.num_tokens
        num_blocks = len(row.request.block_ids) // len(self._windows)
        assert end <= num_blocks * self._block_size, "the block table does not cover the row"
        return {
            self._cell(row.request, position, table)[0]
            for position in range(start, end)
            for table in range(len(self._windows))
        }
