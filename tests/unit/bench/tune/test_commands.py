"""The commands that measure in this process, from options to files, on a small random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bench.__main__ import app
from bench.modes.trial import Server, Trial
from bench.tune import Measured
from tests.support.models import random_model, save_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    return save_folder(random_model("llama"), path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_tune_recommends_what_it_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- begin tune -->\nNot measured yet.\n<!-- end tune -->\nafter\n")
    path = tmp_path / "tune.json"
    options = ["--model", str(folder), "--scale", "0.1", "--kv-cache-mib", "8", "--threads", "1", "--max-seqs", "2"]
    result = run("tune", "--ttft", "100000", "--tpot", "100000", "--page", *options, "-o", str(path))
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["is_whole"]
    assert document["drift"] >= 0
    assert document["recommended"] in document["tried"]
    best = document["recommended"]["candidate"]
    assert f"TIDEGATE_WORKER_MAX_NUM_SEQS={best['max_num_seqs']} " in result.output.replace("\n", " ")
    assert {each["candidate"]["block_size"] for each in document["tried"]} == {8, 16, 32}
    written = page.read_text()
    assert (
        f"| recommended | {best['max_num_seqs']} | {best['max_num_batched_tokens']} | {best['block_size']} |" in written
    )
    assert written.count("| 512 | 16 |") >= 1
    assert written.startswith("before\n")
    assert written.endswith("after\n")


def test_tune_stops_when_its_time_is_over_and_keeps_what_it_has(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.tune.monotonic", iter([0.0, 5.0, 11.0]).__next__)
    monkeypatch.setattr(
        "bench.tune.figures", lambda candidate, _trial: Measured(candidate, 10.0 * candidate.max_num_seqs, 1, 1)
    )
    path = tmp_path / "tune.json"
    options = ["--model", str(folder), "--scale", "0.1", "--kv-cache-mib", "8", "--threads", "1", "--max-seqs", "4"]
    result = run("tune", "--ttft", "9", "--tpot", "9", "--limit", "10", *options, "-o", str(path))
    assert result.exit_code == 130, result.output
    document = json.loads(path.read_text())
    assert not document["is_whole"]
    assert [each["candidate"]["max_num_seqs"] for each in document["tried"]] == [1, 2]


def test_modes_writes_figures_of_all_five(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- begin modes -->\nNot measured yet.\n<!-- end modes -->\nafter\n")
    options = ["--model", str(folder), "--kv-cache-mib", "8", "--threads", "1", "-n", "5", "--batch-sizes", "2"]
    result = run("modes", "--quick", "--page", *options, "-o", str(tmp_path))
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "modes.json").read_text())
    assert document["is_whole"]
    assert [workload["name"] for workload in document["workloads"]] == [
        "short only",
        "30 % long",
        "azure_conversations",
    ]
    for workload in document["workloads"]:
        assert [mode["mode"] for mode in workload["modes"]] == ["static", "client", "continuous", "paged", "full"]
        assert all(mode["offered"]["completed"] == 5 for mode in workload["modes"])
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")
    written = page.read_text()
    assert "Not measured yet" not in written
    assert written.count("\n| full |") == 3
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "E[max of 2]/E[mean]" in " ".join(result.output.split())


def test_ctrl_c_keeps_what_was_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, trials = Server.serve, iter(range(3))

    def interrupted(*arguments: Any) -> Trial:
        if next(trials) == 2:
            raise KeyboardInterrupt
        return serve(*arguments)

    monkeypatch.setattr(Server, "serve", interrupted)
    options = ["--model", str(folder), "--kv-cache-mib", "8", "--threads", "1", "-n", "4", "--batch-sizes", "2"]
    result = run("modes", "--quick", *options, "-o", str(tmp_path))
    assert result.exit_code == 130
    document = json.loads((tmp_path / "modes.json").read_text())
    assert not document["is_whole"]
    [workload] = document["workloads"]
    assert [mode["mode"] for mode in workload["modes"]] == ["static", "client"]
    assert (tmp_path / "modes.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["modes", "--batch-sizes", "8,x"], "numbers from 1 to 512"),
        (["modes", "--batch-sizes", "0"], "numbers from 1 to 512"),
        (["modes", "--dtype", "int8"], "auto, bfloat16 and float32"),
        (["tune", "--ttft", "100", "--tpot", "10", "--workload", "none"], "short only, 30 % long"),
        (["tune", "--tpot", "10"], "--ttft"),
        (["modes", "--page"], "run it in the project's folder"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    result = run("modes", "--model", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "none" in result.output
