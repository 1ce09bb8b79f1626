"""A network namespace with one cable to the machine's own, for programs whose packets can really be lost."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType
from typing import Self


def reason_against_namespaces() -> str:
    """Why none can be made here; empty if one can."""
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    try:
        with Namespace():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


class Namespace:
    """A context manager. Raises CalledProcessError where the rights are missing."""

    def __init__(self) -> None:
        self.name = f"chaos-{secrets.token_hex(3)}"
        self._cable = self.name.replace("-", "")  # a device's name has 15 characters at most
        subnet = f"10.213.{secrets.randbelow(256)}"
        self.outside = f"{subnet}.1"
        self.inside = f"{subnet}.2"

    def __enter__(self) -> Self:
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", "inside", "netns", self.name)
            _ip("address", "add", f"{self.outside}/24", "dev", self._cable)
            _ip("link", "set", self._cable, "up")
            for command in (
                ("address", "add", f"{self.inside}/24", "dev", "inside"),
                ("link", "set", "inside", "up"),
                ("link", "set", "lo", "up"),
            ):
                _ip("-n", self.name, *command)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        subprocess.run(["ip", "link", "delete", self._cable], check=False, capture_output=True)
        _ip("netns", "delete", self.name)

    @property
    def command(self) -> list[str]:
        """What stands in front of a command that is to run inside."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Every packet is lost; nobody is told."""
        _ip("-n", self.name, "link", "set", "inside", "down")

    def mend(self) -> None:
        """The cable is back."""
        _ip("-n", self.name, "link", "set", "inside", "up")


def _ip(*arguments: str) -> None:
    env = {**os.environ, "LC_ALL": "C"}
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, env=env, timeout=10)
