"""Settings of batching: the modes that there are, the defaults, and where steps are recorded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from worker.config import WorkerSettings
from worker.engine.modes import MODES


def read_settings(*flags: str) -> WorkerSettings:
    """As the program reads them at its start."""
    return CliApp.run(WorkerSettings, cli_args=list(flags))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_can_be_chosen(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_WORKER_SCHEDULING_MODE", mode)
    assert read_settings().scheduling_mode == mode


def test_no_other_mode_can_be_chosen() -> None:
    with pytest.raises(ValidationError, match="static"):
        read_settings("--scheduling-mode", "fullest")


def test_without_being_told_everything_is_on_and_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TIDEGATE_WORKER_SCHEDULING_MODE", "TIDEGATE_TRACE"):
        monkeypatch.delenv(name, raising=False)
    settings = read_settings()
    assert (settings.scheduling_mode, settings.trace) == ("full", "")
    assert (settings.step_budget_ms, settings.first_chunk_ms, settings.long_after_steps) == (50.0, 100.0, 128)


def test_the_file_of_the_trace_has_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TRACE", "steps.json")
    assert read_settings().trace == "steps.json"
