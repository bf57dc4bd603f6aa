"""Runs a command that dies with the process that started it: `python -m autotune.probe.torchrun.leash PPID CMD…`.

The kernel's parent-death signal survives exec, so nothing has to watch. A module of its own, because setting it
between fork and exec from a program with threads is not safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends (prctl PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def die_first() -> None:
    """Have the kernel choose this process and its children when memory runs out, not the tuner or a neighbour."""
    with contextlib.suppress(OSError):  # no /proc to write to in some sandboxes
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    die_with_parent()
    if os.getppid() == int(sys.argv[1]):  # else it ended before the leash was on
        os.execvp(sys.argv[2], sys.argv[2:])
