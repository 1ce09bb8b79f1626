"""Tasks that outlive a call: tracked, never silently dead, awaited at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from common.errors import TidegateError

_log = structlog.get_logger(__name__)


class Background:
    """Owner of a program's loops and of its calls' last steps."""

    def __init__(self, on_crash: Callable[[], None]) -> None:
        """`on_crash` is called when a loop ends by an exception: the program cannot do its work any more."""
        self._on_crash = on_crash
        self._steps: set[asyncio.Task[Any]] = set()
        self._loops: set[asyncio.Task[None]] = set()
        self.is_crashed = False

    def spawn(self, step: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Starts a step that is finished whatever becomes of its caller, who may look at its exception."""
        task = asyncio.create_task(step, name=name)
        self._steps.add(task)
        task.add_done_callback(self._end_step)
        return task

    def run(self, loop: Callable[[], Awaitable[None]], name: str) -> None:
        """Starts a loop that runs until `close`."""
        task = asyncio.create_task(self._supervise(loop, name), name=name)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)

    @property
    def num_steps(self) -> int:
        """Steps that are not finished."""
        return len(self._steps)

    async def finish_steps(self, timeout_s: float) -> None:
        """Waits until no step is left, at most `timeout_s`; then cancels the rest."""

        async def drained() -> None:
            while self._steps:
                await asyncio.wait(self._steps)

        try:
            async with asyncio.timeout(timeout_s):
                await drained()
        except TimeoutError:
            _log.warning("steps_given_up", num_steps=len(self._steps))
            await _cancel(self._steps)

    async def close(self) -> None:
        """Cancels loops, then steps, and waits for them."""
        await _cancel(self._loops)
        await _cancel(self._steps)

    async def _supervise(self, loop: Callable[[], Awaitable[None]], name: str) -> None:
        try:
            await loop()
        except Exception:  # noqa: BLE001 - logged, and the program says that it is unwell
            _log.exception("loop_crashed", loop=name)
            self.is_crashed = True
            self._on_crash()

    def _end_step(self, task: asyncio.Task[Any]) -> None:
        self._steps.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TidegateError):  # those are answers for whoever waits
            _log.error("step_failed", step=task.get_name(), exc_info=error)


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    doomed = list(tasks)
    for task in doomed:
        task.cancel()
    await asyncio.gather(*doomed, return_exceptions=True)
