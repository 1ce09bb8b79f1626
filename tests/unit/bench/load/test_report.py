"""The files of a measurement: keys, completeness, and a page that needs no other file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.load.goodput import CapacitySearch, Judged
from bench.load.plan import Point
from bench.load.record import INTERRUPTED
from bench.load.report import capacity_line, html, markdown, warnings, write_all
from bench.load.results import file_name, run_document, surroundings
from tests.unit.bench.load.made import LOW, RULE, SETUP, completed, ended_badly, run_of

VLLM_KEYS = {"date", "backend", "label", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"}
VLLM_KEYS |= {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"}
VLLM_KEYS |= {"request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"}
VLLM_KEYS |= {"max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls"}
VLLM_KEYS |= {f"{kind}_{metric}_ms" for kind in ("mean", "median", "p99") for metric in ("ttft", "tpot", "itl", "e2el")}

RUNS = [
    run_of(
        Point(rate=float(rate)),
        [
            *(completed(at, [at + 0.1 * rate, at + 0.3 * rate], index=at) for at in range(8)),
            completed(2.0, [3.0, 4.0], sender=LOW),
            ended_badly("RESOURCE_EXHAUSTED", reason="QUEUE_FULL", sender=LOW),
        ],
    )
    for rate in (1, 2)
]


def test_a_run_has_the_keys_of_vllm_and_is_json() -> None:
    setup = SETUP.__class__(SETUP.model, SETUP.workload, {"arrivals": "poisson", "burstiness": 1.0}, [], RULE)
    document = run_document(RUNS[1], setup, is_detailed=True)
    assert set(document) >= VLLM_KEYS
    assert json.loads(json.dumps(document, allow_nan=False))["request_rate"] == 2.0
    assert run_document(run_of(Point(), []), setup, is_detailed=False)["request_rate"] == "inf"
    columns = (
        "input_lens",
        "output_lens",
        "ttfts",
        "latencies",
        "errors",
        "scheduled",
        "sent",
        "statuses",
        "kinds",
        "itls",
    )
    assert {len(document[name]) for name in columns} == {10}  # type: ignore[arg-type]
    assert document["statuses"][-1] == "RESOURCE_EXHAUSTED/QUEUE_FULL"  # type: ignore[index]


def test_keys_and_secrets_are_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_FLEET_KEY", "secret-1")
    monkeypatch.setenv("TIDEGATE_WORKER_MAX_NUM_SEQS", "7")
    told = surroundings(is_local=True)["environment"]
    assert "TIDEGATE_WORKER_MAX_NUM_SEQS" in told  # type: ignore[operator]
    assert "secret-1" not in json.dumps(told)
    document = json.dumps(run_document(RUNS[0], SETUP, is_detailed=True))
    assert "key-acme" not in document + html(RUNS, SETUP, {}, None, ())


@pytest.fixture
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of few pixels, which are soon drawn."""
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    monkeypatch.setattr("bench.load.plots.DPI", 30)


@pytest.mark.usefixtures("_coarse")
def test_everything_is_written(tmp_path: Path) -> None:
    search = CapacitySearch(1.0)
    tried = [Judged(1.0, 1.0), Judged(2.0, 0.2)]
    page = write_all(tmp_path / "new", RUNS, SETUP, search=search, tried=tried)
    names = {path.name for path in page.parent.iterdir()}
    runs = {"01-rate-1", "02-rate-2"}
    pictures = {f"{run}-{what}.png" for run in runs for what in ("latency", "timeline", "service")}
    sweep = {"latency.png", "knee.png", "goodput.png", "throughput.png"}
    assert names == {f"{run}.json" for run in runs} | pictures | sweep | {"sweep.json", "report.html"}
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == len(pictures | sweep)
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "model &lt;1&gt;" in text
    assert "<1>" not in text
    assert json.loads((page.parent / "sweep.json").read_text())["capacity"]["request_rate"] == 1.0


def test_the_page_has_a_row_for_each_run_and_says_what_failed_and_what_is_served() -> None:
    text = markdown(
        RUNS, SETUP, CapacitySearch(1.0), [Judged(1.0, 1.0), Judged(2.0, 0.2)], "python -m bench load mixed"
    )
    assert "`python -m bench load mixed`" in text
    assert "| rate 1 | 10 | 9 | 1 | 1 |" in text
    assert "RESOURCE_EXHAUSTED/QUEUE_FULL" in text
    assert "Capacity: 1 requests/s" in text


@pytest.mark.usefixtures("_coarse")
def test_a_run_without_any_answer_is_written_too(tmp_path: Path) -> None:
    runs = [run_of(Point(rate=1.0), [ended_badly("UNAVAILABLE", reason="NO_WORKERS")]), run_of(Point(rate=2.0), [])]
    page = write_all(tmp_path, runs, SETUP)
    assert "UNAVAILABLE/NO_WORKERS" in page.read_text(encoding="utf-8")


def test_no_pictures(tmp_path: Path) -> None:
    write_all(tmp_path, RUNS[:1], SETUP, has_pictures=False)
    assert {path.name for path in tmp_path.iterdir()} == {"01-rate-1.json", "sweep.json"}


def test_a_reader_is_warned() -> None:
    stopped = run_of(Point(concurrency=2), [completed(0.0, [1.0]), ended_badly(INTERRUPTED)], num_planned=9)
    late = completed(0.0, [1.0])
    late.sent_s = 0.5
    lines = warnings([*RUNS[:1], stopped, run_of(Point(rate=3.0), [late])])
    assert len(lines) == 3
    assert "1 failed, refusals included: {'RESOURCE_EXHAUSTED/QUEUE_FULL': 1}" in lines[0]
    assert "stopped early; 2 of 9" in lines[1]
    assert "delay in sending is 500 ms" in lines[2]


def test_capacity_in_words() -> None:
    search = CapacitySearch(1.0)
    assert "not found" in capacity_line(search, [Judged(1.0, 0.1)], SETUP)
    assert "1 requests/s or more" in capacity_line(search, [Judged(1.0, 1.0)], SETUP)
    assert "TTFT ≤ 1000 ms" in capacity_line(search, [Judged(1.0, 1.0), Judged(2.0, 0.5)], SETUP)


def test_file_names_are_safe() -> None:
    assert file_name(0, run_of(Point(rate=0.5, repeat=2), [])) == "01-rate-0.5-repeat-2"
