"""Engines run as child processes: their measurements come through, their failures are shown."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import peers
from bench.peers import Outcome
from bench.report import Measurement

MEASURED = Measurement("engine", "decode", 2.0, 3, 4, ttft_ms=5.0)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peers, "STATE", tmp_path)
    return tmp_path


def run(code: str, limit_s: float = 60.0) -> Outcome:
    command = [sys.executable, "-c", code]
    return peers.run_child("engine", command, peers.environment(1), Console(quiet=True), limit_s=limit_s)


def test_measurements_come_through_and_the_rest_goes_to_the_log(state: Path):
    assert run(f"print('loading'); print({MEASURED.to_line()!r})") == Outcome([MEASURED])
    assert (state / "engine.log").read_text().splitlines()[0] == "loading"


@pytest.mark.parametrize("code", ["raise SystemExit('no such weights')", "print('no such weights')"])
def test_an_engine_that_fails_or_measures_nothing_has_its_last_words_shown(state: Path, code: str):
    assert "no such weights" in run(code).failure


def test_an_engine_that_takes_too_long_is_ended_with_what_it_started_and_what_it_measured_counts(state: Path):
    sleeper = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    outcome = run(f"{sleeper}; print({MEASURED.to_line()!r}, flush=True); time.sleep(600)", limit_s=10.0)
    assert outcome.measurements == [MEASURED]
    assert "stopped after 10 s" in outcome.failure


def test_all_engines_get_the_same_threads():
    environment = peers.environment(1)
    assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "1"
    assert len(environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


def test_an_environment_is_reused_until_its_requirement_changes(state: Path):
    peer = peers.PEERS["vllm"]
    mark = state / peer.name / ".installed"
    mark.parent.mkdir()
    mark.write_text(peer.requirement)
    peers.set_up(peer, Console(quiet=True), fresh=False)
    assert [path.name for path in mark.parent.iterdir()] == [".installed"]
