"""The local redis-server answers, is private, and goes when its owner goes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from common import local_redis
from common.local_redis import LocalRedis, LocalRedisError

OWNER = """
import sys, time
from common.local_redis import LocalRedis
server = LocalRedis()
server.start()
print(server.pid, server.socket_path, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_answers_while_the_block_lasts_and_leaves_nothing() -> None:
    with LocalRedis() as server:
        folder, pid = server.socket_path.parent, server.pid
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("save") == {"save": ""}
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()
    assert pid is not None
    assert not is_running(pid)


def test_a_given_directory_keeps_the_url_over_a_restart(tmp_path: Path) -> None:
    with LocalRedis(tmp_path) as first, redis.Redis.from_url(first.url) as client:
        client.set("a", "1")
        url = first.url
    with LocalRedis(tmp_path) as second, redis.Redis.from_url(second.url) as client:
        assert second.url == url
        assert client.get("a") is None


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_owner_takes_the_server_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid_text, socket_path = owner.stdout.readline().split()
        pid = int(pid_text)
        assert is_running(pid)
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while is_running(pid):
        assert time.monotonic() < deadline, "redis-server outlived its owner"
        time.sleep(0.01)
    shutil.rmtree(Path(socket_path).parent)


def test_without_any_redis_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_redis, "find_spec", lambda name: None)
    with pytest.raises(LocalRedisError, match=r"TIDEGATE_REDIS_URL.*local"), local_redis.redis_url(None):
        pass
    with local_redis.redis_url("redis://elsewhere:6379") as url:
        assert url == "redis://elsewhere:6379"


def test_a_socket_path_too_long_for_the_kernel_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with pytest.raises(LocalRedisError, match="over 100 bytes"):
        LocalRedis(folder).start()
