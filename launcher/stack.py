"""A whole deployment as child processes: redis, one worker, one gateway; up together, gone together."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from common.default_model import ensure_default_model
from common.local_redis import redis_url
from common.rpc.probe import wait_until_serving
from launcher.ports import free_ports
from launcher.process import Child
from launcher.tenants import LocalTenant, make_tenants, write_tenants_file

START_TIMEOUT_S = 180.0
DRAIN_S = 30.0
PROGRESS_INTERVAL_S = 0.25
STOP_MARGIN_S = 10.0  # on top of the drain: for a program to take its leave

_T = TypeVar("_T")


class StartError(Exception):
    """The deployment did not come up; the message says what was seen last."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start, and where it leaves its files."""

    state_dir: Path
    gateway_port: int | None = None  # None: any free one
    tenants: tuple[LocalTenant, ...] = ()  # none: one of each band


class Stack:
    """An async context manager: inside it everything is up, after it nothing is left.

    `on_progress` is told in words what takes long.
    """

    def __init__(self, options: StackOptions, on_progress: Callable[[str], None]) -> None:
        self._options = options
        self._on_progress = on_progress
        self._children: list[Child] = []
        self._resources = ExitStack()
        self.tenants = options.tenants or make_tenants()
        ports = free_ports(4)
        self.gateway_address = f"127.0.0.1:{options.gateway_port or ports[0]}"
        self.worker_address = f"127.0.0.1:{ports[1]}"
        self.gateway_metrics = f"127.0.0.1:{ports[2]}"
        self.worker_metrics = f"127.0.0.1:{ports[3]}"
        self.redis_url = ""

    @property
    def log_dir(self) -> Path:
        """Where the children's logs are."""
        return self._options.state_dir / "logs"

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def kill(self) -> None:
        """Ends all children at once, without drain."""
        for child in self._children:
            child.kill()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`; raises ChildDiedError as soon as a child ends meanwhile."""
        working = asyncio.create_task(work)
        deaths = [asyncio.create_task(child.died()) for child in self._children]
        try:
            await asyncio.wait([working, *deaths], return_when=asyncio.FIRST_COMPLETED)
            for death in deaths:
                if death.done():
                    raise death.result()
            return await working
        finally:
            for task in (working, *deaths):
                task.cancel()
            await asyncio.gather(working, *deaths, return_exceptions=True)

    async def _start(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if not os.environ.get("TIDEGATE_WORKER_MODEL"):  # the worker will find it in the cache
            await asyncio.to_thread(ensure_default_model, on_progress=self._on_progress)
        self._on_progress("starting redis")
        # The local server lives as long as the thread that starts it, so this is done here and not in another one.
        self.redis_url = self._resources.enter_context(redis_url(os.environ.get("TIDEGATE_REDIS_URL")))
        tenants_file = self._options.state_dir / "tenants.json"
        write_tenants_file(self.tenants, tenants_file)
        shared = {"TIDEGATE_FLEET_KEY": secrets.token_urlsafe(24), "TIDEGATE_REDIS_URL": self.redis_url}
        worker = {
            "TIDEGATE_WORKER_LISTEN": self.worker_address,
            "TIDEGATE_WORKER_METRICS_LISTEN": self.worker_metrics,
            "TIDEGATE_WORKER_GATEWAYS": self.gateway_address,
            "TIDEGATE_WORKER_DRAIN_S": str(DRAIN_S),
        }
        gateway = {
            "TIDEGATE_GATEWAY_LISTEN": self.gateway_address,
            "TIDEGATE_GATEWAY_METRICS_LISTEN": self.gateway_metrics,
            "TIDEGATE_GATEWAY_TENANTS_FILE": str(tenants_file),
            "TIDEGATE_GATEWAY_DRAIN_S": str(DRAIN_S),
        }
        await self._start_child("worker", os.environ | shared | worker)
        await self._start_child("gateway", os.environ | shared | gateway)
        await self.run(self._until_serving())

    async def _start_child(self, name: str, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", name]
        self._children.append(await Child.start(name, command, env, self.log_dir))

    async def _until_serving(self) -> None:
        showing = asyncio.create_task(self._show_progress())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await wait_until_serving(self.worker_address)
                self._on_progress("waiting for the gateway to reach the worker")
                await wait_until_serving(self.gateway_address)
        except TimeoutError:
            message = f"Nothing serves after {START_TIMEOUT_S:g} s; the logs in {self.log_dir} may say why."
            raise StartError(message) from None
        finally:
            showing.cancel()

    async def _show_progress(self) -> None:
        """Repeats what the worker logs, until cancelled."""
        shown = ""
        while True:
            event = _last_event(self._children[0])
            if event != shown:
                shown = event
                self._on_progress(f"worker: {event}")
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    async def _stop(self) -> None:
        """The gateway first, so that live streams end well, then the worker, then redis."""
        try:
            for child in reversed(self._children):
                await child.stop(drain_s=DRAIN_S + STOP_MARGIN_S)
        finally:
            self.kill()
            self._resources.close()


def _last_event(child: Child) -> str:
    """The event of the child's last log line, as words; empty if it logs for people."""
    lines = child.tail(1)
    try:
        return str(json.loads(lines[0])["event"]).replace("_", " ") if lines else ""
    except (ValueError, KeyError, TypeError):
        return ""
