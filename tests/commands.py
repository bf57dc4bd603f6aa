"""Running the program as people do: real processes, in a folder of their own, nothing of which may outlive a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "AUTOTUNE_TEST_MARK"
"""By this variable of their environment the processes of a run are known."""
LONGEST_S = 240.0
"""The first run on a machine compiles DeepSpeed's operations."""


@dataclass
class Run:
    """One run of a command: started, then waited for."""

    process: subprocess.Popen[str]
    mark: str
    out: str = ""
    err: str = ""

    @property
    def code(self) -> int:
        return int(self.process.returncode)

    def finish(self) -> Run:
        """Wait for its end and read what it said."""
        try:
            out, err = self.process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            for process in self.living():
                process.kill()
            raise
        self.out += out
        self.err += err
        return self

    def until(self, words: str) -> None:
        """Read stderr up to a line with these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line
            if words in line:
                return
        raise AssertionError(f"it ended without saying {words!r}:\n{self.err}")

    @property
    def left(self) -> list[str]:
        """The processes of this run that are still there, a moment after its end."""
        deadline = time.monotonic() + 5
        while (found := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [" ".join(process.cmdline()) for process in found]

    def living(self) -> list[psutil.Process]:
        """Every process that has inherited this run's mark, wherever it hangs in the tree."""
        return marked(self.mark)


def marked(mark: str) -> list[psutil.Process]:
    """Every process that has inherited a mark."""

    def is_marked(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if is_marked(process)]


def start(command: Sequence[str], folder: Path, **environ: str) -> Run:
    """Start a command in a folder, with a mark in its environment by which its processes are known."""
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_STORE"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, MARK: mark, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Run(process, mark)


def autotune(folder: Path, *arguments: str, **environ: str) -> Run:
    """Start `python -m autotune`."""
    return start([sys.executable, "-m", "autotune", *arguments], folder, **environ)


def python(folder: Path, code: str, *arguments: str, **environ: str) -> Run:
    """Start a piece of Python."""
    return start([sys.executable, "-c", code, *arguments], folder, **environ)


def wait_for(happens: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + within_s
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.1)
