"""Several gateways on one port: each a process of its own, to which the kernel gives connections in turn."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

import structlog

from common.rpc.server import ListenError
from gateway.config import GatewaySettings

_log = structlog.get_logger(__name__)

_MIN_LIFE_S = 1.0  # a process that was killed is started again at most this often
_MAX_ID_LENGTH = 60

Program = Callable[[GatewaySettings, str], None]
"""Runs one gateway on the store at that URL until SIGTERM; importable, as it is called in new processes."""


class Processes:
    """The parent of the gateways. It serves nothing itself: it passes signals on and replaces what was killed."""

    def __init__(self, settings: GatewaySettings, url: str, program: Program) -> None:
        self._settings = settings
        self._url = url
        self._program = program
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[int, tuple[SpawnProcess, float]] = {}  # by number, with the time of the start
        self._is_stopping = False

    def run(self) -> int:
        """Returns when every gateway has ended: 0, or 1 if one could not do its work, which ends the others.

        Raises ListenError if the port is taken.
        """
        with _reserve(self._settings.listen) as port:
            host = self._settings.listen.rpartition(":")[0]
            listen = f"{host}:{port.getsockname()[1]}"
            for kind in (signal.SIGTERM, signal.SIGINT):
                signal.signal(kind, lambda *_: self._stop())
            for number in range(self._settings.processes):
                self._start(number, listen)
            is_faulty = False
            while self._children:
                wait([child.sentinel for child, _ in self._children.values()])
                for number, (child, started) in list(self._children.items()):
                    if child.exitcode is None:
                        continue
                    del self._children[number]
                    if child.exitcode > 0:
                        is_faulty = True
                        self._stop()
                    elif child.exitcode < 0 and not self._is_stopping:
                        _log.error("gateway_process_killed", pid=child.pid, signal=-child.exitcode)
                        time.sleep(max(0.0, _MIN_LIFE_S - (time.monotonic() - started)))
                        self._start(number, listen)
        return int(is_faulty)

    def _start(self, number: int, listen: str) -> None:
        if self._is_stopping:
            return
        arguments = (self._program, one_of_several(self._settings, number, listen), self._url)
        child = self._context.Process(target=_run_child, args=arguments, name=f"gateway {number}")
        child.start()
        self._children[number] = (child, time.monotonic())
        if self._is_stopping:  # the signal came meanwhile
            child.terminate()

    def _stop(self) -> None:
        self._is_stopping = True
        for child, _ in list(self._children.values()):
            child.terminate()


def one_of_several(settings: GatewaySettings, number: int, listen: str) -> GatewaySettings:
    """The settings of one process: an id and a metrics port of its own."""
    changes: dict[str, object] = {"listen": listen}
    if settings.gateway_id:
        changes["gateway_id"] = f"{settings.gateway_id[:_MAX_ID_LENGTH]}-{number}"
    host, _, port = settings.metrics_listen.rpartition(":")
    if port and int(port):
        changes["metrics_listen"] = f"{host}:{int(port) + number}"
    return settings.model_copy(update=changes)


def parent_sentinel() -> int | None:
    """In a process of several: a descriptor that becomes readable when the parent is gone."""
    parent = multiprocessing.parent_process()
    return None if parent is None else int(parent.sentinel)


def _run_child(program: Program, settings: GatewaySettings, url: str) -> None:
    os.setpgrp()  # a terminal's Ctrl-C is for the parent, which passes it on
    program(settings, url)


def _reserve(listen: str) -> socket.socket:
    """A socket that holds the port while the gateways come and go; it never listens. Raises ListenError."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as alone:
            # Left to itself, the option below would let two programs share a port without anybody knowing.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        raise ListenError(f"cannot listen at {listen}: {error.strerror or error}") from error
    return held
