"""`python -m gateway` as a program: what it says when it cannot start, and how it stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gateway.tenants import hash_key


def start(tmp_path: Path, *flags: str, tenants: object = None) -> subprocess.Popen[str]:
    file = tmp_path / "tenants.json"
    if tenants is not None:
        file.write_text(json.dumps(tenants))
    command = [sys.executable, "-m", "gateway", "--tenants-file", str(file), "--log-format", "json"]
    addresses = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.Popen(
        [*command, *addresses, *flags], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


GOOD = {"tenants": [{"id": "acme", "key_sha256": hash_key("k"), "band": "high"}]}


@pytest.mark.parametrize(
    ("flags", "tenants", "words"),
    [
        ((), None, ["tenants.json", "No such file"]),
        ((), {"tenants": [{"id": "X"}]}, ["tenants.json", "entry 1"]),
        (("--queue-ttl-s", "-1"), GOOD, ["queue_ttl_s", "greater than 0", "-1"]),
        (("--listen", "256.1.1.1:1"), GOOD, ["256.1.1.1:1"]),
    ],
)
def test_what_stops_the_start_is_said_in_one_line(
    tmp_path: Path, flags: tuple[str, ...], tenants: object, words: list[str]
) -> None:
    process = start(tmp_path, *flags, tenants=tenants)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1
    lines = [line for line in said.splitlines() if line.startswith("gateway: ")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words)
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well_and_its_redis_with_it(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, tenants=GOOD)
    assert process.stderr is not None
    for line in process.stderr:
        if '"store_up"' in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert [child for child in children if "redis" in child.name()]
    process.send_signal(number)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0
    assert '"gateway_stopped"' in said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
