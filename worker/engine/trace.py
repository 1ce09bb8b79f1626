"""A record of every step that a person can look at, in the Chrome trace format (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import json
from typing import Any, Protocol, TextIO

from worker.engine.batch import Batch
from worker.engine.events import StepStats
from worker.engine.levels import Levels
from worker.engine.scheduler import StepCounts

_ENGINE = 0
_FIRST_SLOT = 1
"""Thread ids: the engine's own, and slot 0's."""

FLUSH_EVENTS = 2000


class Tracer(Protocol):
    """Is told of every step that computes something: of its execution, then of all of it."""

    def record_execution(self, batch: Batch, levels: Levels, began_s: float, ended_s: float) -> None:
        """The batch was executed, and the requests are as they were before."""
        ...

    def record_step(self, step: StepCounts, stats: StepStats, began_s: float, ended_s: float) -> None:
        """The step is over."""
        ...


class ChromeTrace:
    """Writes a step as a slice with the time of its execution inside, a slice per request in the row of its slot,
    counters for blocks, requests and tokens, and marks for preemptions.

    The file is a JSON array whose closing bracket may be missing, as the format allows; events are written in pieces,
    so the last ones come with `close`.
    """

    def __init__(self, out: TextIO) -> None:
        """Owns `out` from here on."""
        self._out = out
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": _ENGINE, "name": "thread_name", "args": {"name": "engine"}}
        ]
        self._named_slots: set[int] = set()
        self._num_steps = 0
        out.write("[\n")

    def record_execution(self, batch: Batch, levels: Levels, began_s: float, ended_s: float) -> None:
        """See Tracer."""
        self._slice(_ENGINE, "execute", began_s, ended_s, {})
        for row in batch.rows:
            request = row.request
            self._name_slot(request.slot)
            is_decode = row.num_new == 1 and request.num_tokens > request.entry_tokens
            args = {
                "request": request.request_id,
                "level": int(levels.level(request)) if is_decode else None,
                "computed": request.num_computed,
                "tokens": request.num_tokens,
                "blocks": len(request.block_ids),
            }
            name = "decode" if is_decode else f"chunk {row.num_new}"
            self._slice(_FIRST_SLOT + request.slot, name, began_s, ended_s, args)

    def record_step(self, step: StepCounts, stats: StepStats, began_s: float, ended_s: float) -> None:
        """See Tracer."""
        self._num_steps += 1
        self._slice(_ENGINE, f"step {self._num_steps}", began_s, ended_s, _step_args(stats))
        for request in step.preempted:
            args = {"request": request.request_id, "count": request.num_preemptions, "lost": request.num_lost}
            self._event("i", _ENGINE, "preempt", began_s, s="g", args=args)
        blocks = {"referenced": stats.referenced_blocks, "cached": stats.cached_blocks, "empty": stats.empty_blocks}
        self._event("C", _ENGINE, "blocks", began_s, args=blocks)
        self._event("C", _ENGINE, "requests", began_s, args={"running": stats.running, "waiting": stats.waiting})
        if len(self._events) >= FLUSH_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Writes what is buffered."""
        self._out.write("".join(json.dumps(event, separators=(",", ":")) + ",\n" for event in self._events))
        self._out.flush()
        self._events.clear()

    def close(self) -> None:
        """Writes the rest and closes the file."""
        self.flush()
        self._out.write('{"ph":"M","pid":0,"name":"process_name","args":{"name":"tidegate worker"}}\n]\n')
        self._out.close()

    def _name_slot(self, slot: int) -> None:
        if slot not in self._named_slots:
            self._named_slots.add(slot)
            name = {"name": f"slot {slot}"}
            self._events.append({"ph": "M", "pid": 0, "tid": _FIRST_SLOT + slot, "name": "thread_name", "args": name})

    def _slice(self, tid: int, name: str, begin_s: float, end_s: float, args: dict[str, Any]) -> None:
        self._event("X", tid, name, begin_s, dur=round((end_s - begin_s) * 1e6, 1), args=args)

    def _event(self, phase: str, tid: int, name: str, at_s: float, **more: Any) -> None:
        self._events.append({"ph": phase, "pid": 0, "tid": tid, "name": name, "ts": round(at_s * 1e6, 1)} | more)


def _step_args(stats: StepStats) -> dict[str, Any]:
    return {
        "tokens": stats.num_tokens,
        "first_chunks": len(stats.first_chunk_waits_s),
        "decodes": stats.num_decodes,
        "long_decodes": stats.num_long_decodes,
        "preemptions": stats.num_preemptions,
        "yielded": stats.num_yielded,
        "overtakes": stats.num_overtakes,
        "recomputed": stats.num_recomputed_tokens,
        "swapped_out": stats.num_saved_tokens,
        "swapped_in": stats.num_loaded_tokens,
    }
