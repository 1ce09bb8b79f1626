from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from common.log import setup_logging


@pytest.fixture(autouse=True)
def _default_logging_afterwards() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_json_lines_carry_what_is_bound(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "json", program="gateway")
    log = structlog.get_logger()
    with structlog.contextvars.bound_contextvars(request_id="acme/r1", tenant="acme"):
        log.info("request_ended", tokens=3)
    log.debug("not shown")
    [line] = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {
        "event": "request_ended",
        "level": "info",
        "program": "gateway",
        "request_id": "acme/r1",
        "tenant": "acme",
        "tokens": 3,
    }


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_show_no_local_variables(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("debug", log_format, program="worker")
    try:
        prompt = "-".join(["private", "words"])
        raise RuntimeError(f"bug {len(prompt)}")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    shown = capsys.readouterr().err
    assert "RuntimeError: bug 13" in shown
    assert "private-words" not in shown


def test_auto_is_json_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("warning", "auto", program="worker")
    structlog.get_logger().warning("seen")
    structlog.get_logger().info("unseen")
    assert json.loads(capsys.readouterr().err)["event"] == "seen"
