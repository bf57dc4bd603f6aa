"""The further workers that one command starts with `probe.parallel`: processes of their own that die with it.

What they are to do comes through their standard input (sibling.py), so no argument says it.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from autotune.probe.torchrun.launcher import leashed
from autotune.probe.torchrun.starting import last_line, log_file
from autotune.process import kill_tree
from autotune.settings import Settings

END_S = 60.0
"""Workers have so long to find what another one has confirmed, write the files and go, seconds."""

INTERRUPT_S = 10.0
"""An interrupted worker has so long to end its probe, seconds."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of a command's workers a process is.

    Attributes:
        index: 0 for the one that the command itself is.
        family: what they have in common, None where there are no others.
    """

    index: int = 0
    family: str | None = None


class Siblings:
    """The further workers of a command.

    Args:
        settings: of the sweep: theirs are the same.
        family: see Place.
        tell: takes a sentence where one of them fails.
    """

    def __init__(self, settings: Settings, family: str, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        for index in range(1, settings.probe.parallel):
            log = log_file()
            process = subprocess.Popen(
                leashed([sys.executable, "-m", "autotune.sibling"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # what it would say at the end is said once, by us
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on
            )
            self._running.append((process, log))
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(pickle.dumps((settings, Place(index, family))))

    def wait(self) -> None:
        """Let them end by themselves: whoever still holds the finals, or looks at what was confirmed."""
        deadline = time.monotonic() + END_S
        for number, (process, log) in enumerate(self._running, start=2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(max(0.0, deadline - time.monotonic())) != 0:
                    code = process.returncode
                    self._tell(f"worker {number} of this command ended with code {code}: {last_line(log)}")

    def close(self) -> None:
        """End those that are still there, and all that they started."""
        for process, _ in self._running:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + INTERRUPT_S
        for process, log in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            kill_tree(process.pid)
            process.wait()
            log.close()
        self._running = []
