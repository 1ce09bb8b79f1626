"""Reads published request traces, whatever their columns are called, into one kind of row."""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

# Names that published traces use, the first found counts; the factor turns a number into seconds.
_PROMPT = ("prompt_tokens", "ContextTokens", "input_length", "num_prefill_tokens")
_OUTPUT = ("output_tokens", "GeneratedTokens", "output_length", "num_decode_tokens")
_ARRIVAL = {"arrival_s": 1.0, "timestamp": 1e-3, "TIMESTAMP": 1.0, "arrived_at": 1.0}
_COARSE_SHARE = 0.5
"""A trace whose arrivals coincide with the one before more often than this has a coarse clock."""


class TraceError(ValueError):
    """A file that is not a trace, or a range that has no rows; the message says what was wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; lengths in tokens, at least 1."""

    num_prompt: int
    num_output: int
    arrival_s: float | None = None  # since the first row that was taken; None: the trace has no arrivals
    client: str = ""
    blocks: tuple[int, ...] = ()  # names of the prompt's leading blocks of `BLOCK_TOKENS`; equal names, equal tokens


BLOCK_TOKENS = 512
"""Tokens of a named prefix block in traces that have them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival, and what was done to get them."""

    path: Path
    rows: tuple[TraceRow, ...]
    num_rows_in_file: int
    first_row: int  # of the rows taken, from 0
    num_empty: int  # rows left out because they have no prompt or no output
    jitter_s: float  # arrivals of one stamp were spread over so many seconds; 0: left as they are

    @property
    def has_arrivals(self) -> bool:
        """Whether the rows say when they arrived."""
        return all(row.arrival_s is not None for row in self.rows)

    def describe(self) -> dict[str, object]:
        """What a result must state of the trace it came from."""
        return {
            "file": self.path.name,
            "rows_in_file": self.num_rows_in_file,
            "first_row": self.first_row,
            "rows_taken": len(self.rows) + self.num_empty,
            "rows_without_tokens": self.num_empty,
            "has_arrivals": self.has_arrivals,
            "arrival_jitter_s": self.jitter_s,
        }


def parse_range(text: str) -> tuple[int, int | None]:
    """`START:END` as row numbers from 0, the end excluded; either may be left out. Raises TraceError."""
    start, colon, end = text.partition(":")
    try:
        first, last = int(start or 0), int(end) if end else None
    except ValueError:
        first, last = -1, None
    if not colon or first < 0 or (last is not None and last <= first):
        raise TraceError(f"{text!r} is not a range of rows: give START:END with 0 <= START < END, as in 100:200")
    return first, last


def load_trace(path: Path, *, first_row: int = 0, end_row: int | None = None, seed: int = 0) -> Trace:
    """Reads rows `first_row` up to `end_row` (excluded; None: all) of a .csv or .jsonl file.

    A coarse clock (most arrivals coincide) is refined: requests of one stamp are spread uniformly, drawn with `seed`,
    over the time to the next stamp. Raises TraceError.
    """
    try:
        records = list(_records(path))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    taken = records[first_row:end_row]
    if not taken:
        raise TraceError(f"rows {first_row}:{end_row or ''} of {path}: the file has {len(records)} rows")
    try:
        parsed = [_parse(record) for record in taken]
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError(f"{path}: {_explain(error, taken[0])}") from error
    rows = [row for row in parsed if row is not None]
    if not rows:
        raise TraceError(f"rows {first_row}:{end_row or ''} of {path}: no row has both prompt and output tokens")
    rows, jitter_s = _timed(rows, random.Random(seed))
    return Trace(path, tuple(rows), len(records), first_row, len(parsed) - len(rows), jitter_s)


def _records(path: Path) -> Iterator[Mapping[str, object]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix == ".jsonl":
            for number, line in enumerate(filter(str.strip, file), start=1):
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise TraceError(f"{path}, line {number}: {error}") from error
                if not isinstance(record, dict):
                    raise TraceError(f"{path}, line {number}: not an object")
                yield record
        else:
            raise TraceError(f"{path}: a trace is a .csv or a .jsonl file")


def _parse(record: Mapping[str, object]) -> TraceRow | None:
    """The row, or None if it has nothing to compute."""
    num_prompt, num_output = _count(record, _PROMPT), _count(record, _OUTPUT)
    if num_prompt < 1 or num_output < 1:
        return None
    blocks = record.get("hash_ids") or ()
    if not isinstance(blocks, list | tuple):
        raise ValueError(f"hash_ids is not a list: {blocks!r}")
    name = next((name for name in _ARRIVAL if name in record), None)
    return TraceRow(
        num_prompt,
        num_output,
        arrival_s=None if name is None else _seconds(record[name]) * _ARRIVAL[name],
        client=str(record.get("client") or ""),
        blocks=tuple(int(block) for block in blocks),
    )


def _count(record: Mapping[str, object], names: Sequence[str]) -> int:
    name = next((name for name in names if name in record), None)
    if name is None:
        raise KeyError(" or ".join(names))
    return int(float(str(record[name])))


def _seconds(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        moment = datetime.fromisoformat(str(value))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _explain(error: Exception, record: Mapping[str, object]) -> str:
    if isinstance(error, KeyError):
        return f"no column {error.args[0]}; the columns are {', '.join(record)}"
    return str(error)


def _timed(rows: Iterable[TraceRow], rng: random.Random) -> tuple[list[TraceRow], float]:
    """The rows by arrival, counted from the first, with a coarse clock refined; and the jitter that was used."""
    untimed = [row for row in rows if row.arrival_s is None]
    timed = sorted((row for row in rows if row.arrival_s is not None), key=lambda row: row.arrival_s or 0.0)
    if untimed or not timed:
        return [replace(row, arrival_s=None) for row in rows], 0.0
    stamps = [row.arrival_s - (timed[0].arrival_s or 0.0) for row in timed if row.arrival_s is not None]
    gaps = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    positive = [gap for gap in gaps if gap > 0]
    is_coarse = positive and (len(gaps) - len(positive)) > _COARSE_SHARE * len(gaps)
    jitter_s = min(positive) if is_coarse else 0.0
    spread = sorted(stamp + rng.uniform(0.0, jitter_s) for stamp in stamps) if jitter_s else stamps
    return [replace(row, arrival_s=at - spread[0]) for row, at in zip(timed, spread, strict=True)], jitter_s
