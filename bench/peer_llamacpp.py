"""llama.cpp's batched decoding on the measured workloads; runs in its own virtual environment (see bench/peers.py).

The loop is its server's without HTTP: every running sequence first adds the token it made, prompts fill what is left.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Measurement
from bench.workload import SUITE, Work

NUM_SLOTS = 32
BATCH_TOKENS = 512
SLOT_CONTEXT = 1024  # tokens of shared KV cache per slot: the mixed workload needs it on average, not each at once


@dataclass(slots=True)
class Sequence:
    """A request on its slot: tokens known so far, how many are computed, and how many are still to make."""

    slot: int
    tokens: list[int]
    num_computed: int
    num_left: int


class LlamaCpp:
    """The model and its low-level interface."""

    def __init__(self, weights: Path, num_threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]
        import numpy

        self._api: Any = llama_cpp
        self._numpy: Any = numpy
        self._num_threads = num_threads
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        self._model = self._api.llama_model_load_from_file(str(weights).encode(), params)
        self._vocab_size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))

    def measure(self, name: str, work: list[Work]) -> Measurement:
        """Submits everything at once and runs until the last token."""
        num_slots = min(len(work), NUM_SLOTS)
        context = self._open_context(num_slots)
        batch = self._api.llama_batch_init(BATCH_TOKENS, 0, 1)
        start = time.perf_counter()
        num_made = self._run(context, batch, work, num_slots)
        seconds = time.perf_counter() - start
        self._api.llama_batch_free(batch)
        self._api.llama_free(context)
        return Measurement("llama.cpp, Q4_1", name, seconds, sum(len(request.prompt) for request in work), num_made)

    def _open_context(self, num_slots: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_slots * SLOT_CONTEXT, num_slots
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = True
        return self._api.llama_init_from_model(self._model, params)

    def _run(self, context: Any, batch: Any, work: list[Work], num_slots: int) -> int:
        waiting, free = deque(work), list(range(num_slots))
        running: list[Sequence] = []
        num_made = 0
        while waiting or running:
            while waiting and free:
                request = waiting.popleft()
                running.append(Sequence(free.pop(), list(request.prompt), 0, request.num_output))
            for sequence, row in self._step(context, batch, running):
                sequence.tokens.append(self._greedy(context, row))
                sequence.num_left -= 1
                num_made += 1
            for sequence in [sequence for sequence in running if sequence.num_left == 0]:
                self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), sequence.slot, -1, -1)
                free.append(sequence.slot)
                running.remove(sequence)
        return num_made

    def _step(self, context: Any, batch: Any, running: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Computes one batch; returns the sequences whose next token can be chosen, each with its row of logits."""
        batch.n_tokens = 0
        ready = []
        for sequence in sorted(running, key=lambda sequence: len(sequence.tokens) - sequence.num_computed > 1):
            while sequence.num_computed < len(sequence.tokens) and batch.n_tokens < BATCH_TOKENS:
                row, position = batch.n_tokens, sequence.num_computed
                is_last = position == len(sequence.tokens) - 1
                batch.token[row], batch.pos[row], batch.logits[row] = sequence.tokens[position], position, int(is_last)
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence.slot
                batch.n_tokens = row + 1
                sequence.num_computed += 1
                if is_last:
                    ready.append((sequence, row))
        status = self._api.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")
        return ready

    def _greedy(self, context: Any, row: int) -> int:
        logits = self._api.llama_get_logits_ith(context, row)
        return int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def main() -> None:
    """Prints one line per measured workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workload", action="append", choices=SUITE, help="only these; default: all")
    arguments = parser.parse_args()
    engine = LlamaCpp(arguments.weights, arguments.threads)
    for name in arguments.workload or SUITE:
        print(engine.measure(name, SUITE[name]()).to_line(), flush=True)


if __name__ == "__main__":
    main()
