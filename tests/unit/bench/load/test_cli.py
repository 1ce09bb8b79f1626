"""Wrong usage is said before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.__main__ import app

RUNNER = CliRunner()


def say(*arguments: str) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["load", "--no-plots", *arguments], env={"COLUMNS": "400", "TIDEGATE_API_KEY": ""})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing", "--api-key", "k"], "neither a workload (mixed, decode, burst, prefix) nor a file"),
        (["mixed"], "who sends?"),
        (["--api-key", "k", "--rate", "1", "--concurrency", "2"], "give one of them"),
        (["--api-key", "k", "--rate", "1,x"], "numbers above 0"),
        (["--api-key", "k", "--rate", "inf"], "numbers above 0"),
        (["--api-key", "k", "--concurrency", "1.5"], "whole numbers"),
        (["--api-key", "k", "--goodput", "ttft"], "ttft:MS"),
        (["--api-key", "k", "--arrivals", "trace"], "no arrivals of its own"),
        (["--api-key", "k", "--find-capacity", "--concurrency", "2"], "begins at one --rate"),
        (["--api-key", "k", "--bands", "top"], "not a band"),
        (["--local", "--tenant", "a=k"], "--local makes its tenants"),
        (["--api-key", "k", "--share", "a"], "ID=SHARE"),
        (["--tenants-file", "gone.json"], "gone.json"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    status, output = say(*arguments)
    assert status == 2
    assert said in output


def test_rows_that_a_trace_does_not_have(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("prompt_tokens,output_tokens\n5,6\n")
    assert "has 1 rows" in say(str(trace), "--api-key", "k", "--rows", "3:9")[1]
    assert "START:END" in say(str(trace), "--api-key", "k", "--rows", "3")[1]


def test_nobody_at_the_address() -> None:
    status, output = say("--api-key", "k", "--address", "127.0.0.1:1", "--timeout", "2")
    assert status == 1
    assert "UNAVAILABLE" in output
