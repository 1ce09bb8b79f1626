"""The one bridge between the engine's thread and asyncio: commands in, one call out per step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

from common.clock import Clock
from common.errors import TidegateError
from common.types import Band, SamplingParams
from worker.engine.engine import Engine
from worker.engine.events import StepOutput

OutputCallback = Callable[[StepOutput, float], None]
"""Told a step's output and how many seconds the step took; called on the event loop, must not block."""


class EngineLoop:
    """Owns the engine and the thread that steps it: it runs while there is work and sleeps on a condition otherwise.

    All methods are for the event loop's side. Commands never block and are obeyed in order, before the next step.
    """

    def __init__(
        self, engine: Engine, clock: Clock, *, on_output: OutputCallback, on_dead: Callable[[BaseException], None]
    ) -> None:
        """`on_dead` is called once, on the event loop, if the engine breaks: no request will get another event then."""
        self._engine = engine
        self._clock = clock
        self._on_output = on_output
        self._on_dead = on_dead
        self._condition = threading.Condition()
        self._commands: list[Callable[[], object]] = []  # guarded by the condition
        self._stopping = False  # guarded by the condition
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._asyncio_loop: asyncio.AbstractEventLoop | None = None
        self._drained = asyncio.Event()
        self._draining = False  # the thread's own
        self._last_progress: float | None = None  # None while idle; written by the thread only
        self._dead: BaseException | None = None  # written by the thread only

    @property
    def dead(self) -> BaseException | None:
        """What ended the loop, if it was not `stop`."""
        return self._dead

    @property
    def age_s(self) -> float:
        """Seconds since a step last computed something or the loop was idle: 0 while idle, grows while a step hangs
        or steps compute nothing although requests wait."""
        last_progress = self._last_progress
        return 0.0 if last_progress is None else max(0.0, self._clock.monotonic() - last_progress)

    def start(self) -> None:
        """Starts the thread; outputs are delivered on the running event loop."""
        self._asyncio_loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step in progress and joins it. Requests still there get no event."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._drained.set()

    async def drain(self) -> None:
        """Refuses new requests and returns when all accepted ones have ended, or the loop has."""
        self._send(self._begin_drain)
        await self._drained.wait()

    def open_session(self, session_id: int) -> None:
        """Makes a session known; it is told the block usage at once."""
        self._send(partial(self._engine.open_session, session_id))

    def abort_session(self, session_id: int) -> None:
        """Ends a session and all its requests, without further events."""
        self._send(partial(self._engine.abort_session, session_id))

    def submit(
        self,
        session_id: int,
        request_id: str,
        attempt: int,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        band: Band = Band.NORMAL,
        cache_salt: str = "",
        timeout_s: float | None = None,
        may_hand_back: bool = False,
    ) -> None:
        """Hands a request to the engine; a refusal comes back as a RequestRejected event."""
        submit = partial(
            self._engine.submit,
            session_id,
            request_id,
            attempt,
            prompt_token_ids,
            sampling,
            output_token_ids=output_token_ids,
            band=band,
            cache_salt=cache_salt,
            arrived_s=self._clock.monotonic(),
            timeout_s=timeout_s,
            may_hand_back=may_hand_back,
        )
        self._send(partial(self._submit, submit, session_id, request_id, attempt))

    def abort(self, session_id: int, request_id: str, attempt: int) -> None:
        """Ends a request with reason CANCELLED within a step; nothing if it has ended already."""
        self._send(partial(self._engine.abort, session_id, request_id, attempt))

    def set_paused(self, session_id: int, request_id: str, attempt: int, is_paused: bool) -> None:
        """Stops computing for a request, or goes on with it; nothing if it has ended already."""
        self._send(partial(self._engine.set_paused, session_id, request_id, attempt, is_paused))

    def _send(self, command: Callable[[], object]) -> None:
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey_commands():
                if self._engine.has_work:
                    self._step()
                if self._draining and not self._engine.num_requests:
                    self._call(self._drained.set)
        except BaseException as error:  # noqa: BLE001 - not hidden: told to the owner, and readable in `dead`
            self._dead = error
            self._call(self._drained.set)
            self._call(self._on_dead, error)
        self._last_progress = None

    def _obey_commands(self) -> bool:
        """Waits for commands if there is no work, obeys them, and returns whether to go on."""
        with self._condition:
            while not (self._stopping or self._commands):
                if not self._engine.has_work:
                    self._last_progress = None
                    self._condition.wait()
                elif not self._pause():
                    break
            commands, self._commands = self._commands, []
            stopping = self._stopping
        if self._last_progress is None:
            self._last_progress = self._clock.monotonic()
        for command in commands:
            command()
        return not stopping

    def _pause(self) -> bool:
        """Sleeps while requests only gather, or until a command comes; returns whether it did."""
        pause_s = self._engine.pause_s
        if pause_s <= 0:
            return False
        self._condition.wait(pause_s)
        return True

    def _step(self) -> None:
        started = self._clock.monotonic()
        output = self._engine.step()
        ended = self._clock.monotonic()
        if output.stats.num_rows or not self._engine.num_requests:
            self._last_progress = ended
        self._call(self._on_output, output, ended - started)

    def _submit(self, submit: Callable[[], None], session_id: int, request_id: str, attempt: int) -> None:
        try:
            submit()
        except TidegateError as error:
            self._engine.reject(session_id, request_id, attempt, error.reason, error.message)

    def _begin_drain(self) -> None:
        self._draining = True
        self._engine.drain()

    def _call(self, callback: Callable[..., None], *args: object) -> None:
        assert self._asyncio_loop is not None
        self._asyncio_loop.call_soon_threadsafe(callback, *args)
