"""Trace files of every known form, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.traces import TraceError, load_trace, parse_range

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.2299600,3180,8\n"
)
MOONCAKE = "\n".join(
    f'{{"timestamp": {stamp}, "input_length": 600, "output_length": 5, "hash_ids": [0, {index}]}}'
    for index, stamp in enumerate([0, 0, 0, 3000, 3000, 3000, 9000, 9000])
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_dates_become_seconds_since_the_first_row(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "azure.csv", AZURE))
    assert [(row.num_prompt, row.num_output) for row in trace.rows] == [(4808, 10), (3180, 8)]
    assert trace.rows[0].arrival_s == 0.0
    assert trace.rows[1].arrival_s == pytest.approx(1.25)
    assert trace.jitter_s == 0.0


def test_coarse_stamps_are_spread_up_to_the_next_one(tmp_path: Path) -> None:
    path = write(tmp_path, "mooncake.jsonl", MOONCAKE)
    trace = load_trace(path, seed=1)
    arrivals = [row.arrival_s or 0.0 for row in trace.rows]
    assert trace.jitter_s == 3.0
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 8
    assert arrivals[0] == 0.0
    assert arrivals[-1] < 12.0
    assert [row.blocks[1] for row in trace.rows] == list(range(8))
    assert load_trace(path, seed=1) == trace
    assert load_trace(path, seed=2) != trace


def test_clients_and_arrivals_in_seconds(tmp_path: Path) -> None:
    text = "arrival_s,client,prompt_tokens,output_tokens\n2.5,b,13,199\n0.5,a,36,137\n"
    rows = load_trace(write(tmp_path, "vtc.csv", text)).rows
    assert [(row.client, row.arrival_s) for row in rows] == [("a", 0.0), ("b", 2.0)]


def test_lengths_without_arrivals(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "arxiv.csv", "num_prefill_tokens,num_decode_tokens\n3772,54\n2015,156\n"))
    assert not trace.has_arrivals
    assert [row.num_prompt for row in trace.rows] == [3772, 2015]


def test_a_range_of_rows_is_stated_and_counts_from_its_own_start(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "mooncake.jsonl", MOONCAKE), first_row=3, end_row=5)
    assert len(trace.rows) == 2
    assert trace.rows[0].arrival_s == 0.0
    described = trace.describe()
    assert (described["rows_in_file"], described["first_row"], described["rows_taken"]) == (8, 3, 2)


def test_rows_without_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "t.csv", "prompt_tokens,output_tokens\n5,0\n7,3\n"))
    assert (len(trace.rows), trace.num_empty) == (1, 1)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "prompt,output\n1,2\n", "no column prompt_tokens or .* the columns are prompt, output"),
        ("t.csv", "prompt_tokens,output_tokens\nmany,2\n", "many"),
        ("t.csv", "prompt_tokens,output_tokens\n", "has 0 rows"),
        ("t.jsonl", "[1]\n", "line 1: not an object"),
        ("t.jsonl", "{\n", "line 1"),
        ("t.txt", "1 2\n", r"\.csv or a \.jsonl"),
        ("t.csv", "prompt_tokens,output_tokens,arrival_s\n1,2,yesterday\n", "yesterday"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        load_trace(write(tmp_path, name, text))


def test_a_missing_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.csv cannot be read"):
        load_trace(tmp_path / "gone.csv")


def test_ranges() -> None:
    assert parse_range(":") == (0, None)
    assert parse_range("10:20") == (10, 20)
    assert parse_range("10:") == (10, None)
    for text in ("10", "a:b", "5:5", "-1:3"):
        with pytest.raises(TraceError, match="START:END"):
            parse_range(text)
