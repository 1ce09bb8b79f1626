"""A program that can be killed, stopped, continued, drained, and started again under its old addresses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.process import Child

START_S = 300.0
POLL_S = 0.05
Span = tuple[float, float]  # monotonic times


async def eventually(is_so: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = START_S) -> None:
    """Returns as soon as it is so. Raises AssertionError with `what`."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                answer = is_so()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


class Node:
    """One program of a cluster. Every start writes a log of its own."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        is_ready: Callable[[], Awaitable[bool]],
    ) -> None:
        """`is_ready`: whether a start of it has come up."""
        self.name = name
        self._command = command
        self._env = {**os.environ, **env}
        self._folder = folder
        self._is_ready = is_ready
        self._child: Child | None = None
        self._num_starts = 0
        self.is_frozen = False
        self.ends: list[Span] = []  # when it was killed or drained: each from the signal until it was gone
        self.outages: list[Span] = []  # from then until it was ready again
        self.stops: list[Span] = []  # from freezing to thawing
        self._down_since: float | None = None
        self._stopped_at = 0.0

    def __repr__(self) -> str:
        return f"Node({self.name}, start={self._num_starts}, running={self.is_running}, frozen={self.is_frozen})"

    @property
    def is_running(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self._child is not None and self._child.is_running

    async def start(self) -> None:
        """Starts it unless it runs."""
        if not self.is_running:
            self._num_starts += 1
            self.is_frozen = False
            log_name = f"{self.name}.{self._num_starts}"
            self._child = await Child.start(log_name, self._command, self._env, self._folder)

    async def until_ready(self) -> None:
        """Returns once it serves. Raises AssertionError with its last lines if it does not come up, or has died."""
        try:
            await eventually(self._is_up, f"{self.name} is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(self._child.tail() if self._child else ())) from None
        if self._down_since is not None:
            self.outages.append((self._down_since, time.monotonic()))
            self._down_since = None

    async def _is_up(self) -> bool:
        assert self.is_running, f"{self.name} has ended by itself"
        return await self._is_ready()

    async def kill(self) -> None:
        """SIGKILL."""
        if self._child is not None:
            self._down_since = time.monotonic()
            self._child.kill()
            await self._child.stop(drain_s=0)
            self.ends.append((self._down_since, time.monotonic()))

    async def drain(self, drain_s: float = START_S) -> int:
        """SIGTERM; its exit status. A program that has not ended after `drain_s` is killed, which is its fault."""
        assert self._child is not None
        self.thaw()
        self._down_since = time.monotonic()
        status = await self._child.stop(drain_s=drain_s)
        self.ends.append((self._down_since, time.monotonic()))
        assert status >= 0, f"{self.name} was killed by signal {-status} in its drain"
        return status

    def freeze(self) -> None:
        """SIGSTOP: it is there, and does nothing."""
        self._stopped_at = time.monotonic()
        self._signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        if self.is_frozen:
            self.is_frozen = False
            self.stops.append((self._stopped_at, time.monotonic()))

    def _signal(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Log lines with that event of the present start."""
        found = []
        for line in self._child.tail(1_000_000) if self._child is not None else ():
            if f'"{name}"' in line:
                with contextlib.suppress(ValueError):  # a line that is just being written
                    entry = json.loads(line)
                    if entry.get("event") == name:
                        found.append(entry)
        return found

    def last_words(self, level: str = "error") -> list[str]:
        """Log lines of that level, and those that are no log lines at all, of all starts."""
        lines = []
        for number in range(1, self._num_starts + 1):
            path = self._folder / f"{self.name}.{number}.log"
            text = path.read_text(errors="replace") if path.exists() else ""
            lines += [line for line in text.splitlines() if f'"level": "{level}"' in line or "Traceback" in line]
        return lines
