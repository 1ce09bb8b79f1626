"""Engines run as child processes: their measurements come through, their failures are shown."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import peers
from bench.report import Measurement


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peers, "STATE", tmp_path)
    return tmp_path


def run(code: str) -> list[Measurement]:
    return peers.run_child("engine", [sys.executable, "-c", code], peers.environment(1), Console(quiet=True))


def test_measurements_come_through_and_the_rest_goes_to_the_log(state: Path):
    measurement = Measurement("engine", "decode", 2.0, 3, 4)
    assert run(f"print('loading'); print({measurement.to_line()!r})") == [measurement]
    assert (state / "engine.log").read_text().splitlines()[0] == "loading"


@pytest.mark.parametrize("code", ["raise SystemExit('no such weights')", "print('no such weights')"])
def test_an_engine_that_fails_or_measures_nothing_is_an_error_with_its_last_words(state: Path, code: str):
    with pytest.raises(RuntimeError, match="no such weights"):
        run(code)


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
