"""Runs a command that dies with its parent: `python -m launcher.child PARENT_PID COMMAND...`, Linux only for the dying.

The kernel sends the signal even when the parent is killed without a chance to clean up. It is asked for here and not
in the parent between fork and exec, where a process with threads may run next to nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Replaces this process by the command; exits with 1 if the parent is gone already."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
