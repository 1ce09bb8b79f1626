"""`make run` and `make demo` as a user has them, and what is left of them: nothing."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from common.default_model import ensure_default_model
from launcher.ports import free_ports

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

WAIT_S = 300.0
MARK = "TIDEGATE_TEST_MARK"


def processes_with(mark: str) -> list[str]:
    """Every process that inherited the mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:  # ended meanwhile, or not ours to see
            continue
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@contextmanager
def launched(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launcher and the mark of all that it starts."""
    ensure_default_model()
    mark = secrets.token_hex(8)
    env = os.environ | {MARK: mark, "TIDEGATE_WORKER_KV_CACHE_MIB": "128", "PYTHONUNBUFFERED": "1"}
    env.pop("TIDEGATE_REDIS_URL", None)  # its own redis-server is part of what is tested
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *command, "--state-dir", str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.wait()
        until(lambda: not processes_with(mark), "the launcher's children are gone")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Reads output up to a line with `text`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended with status {process.wait()} before {text!r}:\n{seen}")


def test_demo_answers_three_tenants_and_leaves_nothing(tmp_path: Path) -> None:
    with launched(["demo"], tmp_path) as (process, mark):
        output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output
        assert processes_with(mark) == []
    for tenant in ("paying", "regular", "batch"):
        assert f"[{tenant}, " in output, "its answer was streamed"
    assert "TTFT ms" in output
    assert "Paris" in output


def test_run_stays_up_until_interrupted_then_drains(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with launched(["run", "--port", str(port)], tmp_path) as (process, mark):
        output = read_until(process, "Ready.")
        assert f"127.0.0.1:{port}" in output
        assert "Paris" in output, "the sample question is answered"
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, rest
        assert processes_with(mark) == []
    socket_path = re.search(r"unix://(\S+)", output)
    assert socket_path is not None
    assert not Path(socket_path.group(1)).exists(), "redis is gone, with all it made"
    assert "worker_stopped" in (tmp_path / "logs" / "worker.log").read_text()
    assert "gateway_stopped" in (tmp_path / "logs" / "gateway.log").read_text()


def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path) -> None:
    with launched(["demo"], tmp_path) as (process, _):
        family = psutil.Process(process.pid)
        names = ("redis-server", "worker", "gateway")
        until(lambda: all(any(name in line for line in lines_of(family)) for name in names), "all children run")
        children = family.children(recursive=True)
        process.kill()
        process.wait()
        until(lambda: not any(is_alive(child) for child in children), "no process is left")


def lines_of(process: psutil.Process) -> list[str]:
    """Command lines of all its descendants; redis-server overwrites its environment, so the mark would miss it."""
    with contextlib.suppress(psutil.Error):
        return [" ".join(child.cmdline()) for child in process.children(recursive=True)]
    return []


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_child_that_dies_at_start_is_reported_with_its_words(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_WORKER_MODEL", str(tmp_path / "no-such-model.gguf"))
        with launched(["run", "--port", str(port)], tmp_path) as (process, mark):
            output, _ = process.communicate(timeout=WAIT_S)
            assert process.returncode == 1
            assert "The worker ended with status 1" in output
            assert "no-such-model.gguf" in output
            assert processes_with(mark) == []
