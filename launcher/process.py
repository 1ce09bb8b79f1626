"""One child process: started in a group of its own, watched, its last log lines at hand, stopped for certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL_LINES = 15


class ChildDiedError(Exception):
    """A child process ended although nobody asked it to; the message carries its last log lines."""


class Child:
    """A running child process. Its group is its own, so that a terminal's Ctrl-C reaches only the launcher."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @classmethod
    async def start(cls, name: str, command: Sequence[str], env: Mapping[str, str], log_dir: Path) -> Child:
        """Starts `command`, writing to `name.log` in the existing `log_dir`; it is killed should this process die."""
        log_path = log_dir / f"{name}.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "launcher.child", str(os.getpid()), *command),
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    def tail(self, num_lines: int = TAIL_LINES) -> list[str]:
        """The last lines it wrote."""
        return self.log_path.read_text(errors="replace").splitlines()[-num_lines:]

    async def died(self) -> ChildDiedError:
        """Waits until it ends, and says how: for a caller to whom its end is an error."""
        status = await self._process.wait()
        end = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = "\n".join(f"  {line}" for line in self.tail())
        return ChildDiedError(f"The {self.name} ended {end}. Its last lines ({self.log_path}):\n{lines}")

    async def stop(self, *, drain_s: float) -> int:
        """Asks it to drain, kills its whole group if it has not ended after `drain_s`; returns its exit status."""
        if self.is_running:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), drain_s)
        self.kill()
        return await self._process.wait()

    def kill(self) -> None:
        """Ends it and whatever it started, at once."""
        with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)

    def __repr__(self) -> str:
        return f"Child({self.name}, pid={self.pid}, returncode={self._process.returncode})"
