"""What can happen to our own processes and files while a probe is under way."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.commands import Run, start

Happening = Callable[[Path], object]
"""Takes the folder that the probe's run directory lies in."""


def below(words: str) -> psutil.Process:
    """The process somewhere below this one whose command line has these words."""
    for process in psutil.Process().children(recursive=True):
        try:
            if words in " ".join(process.cmdline()) and "torchrun.leash" not in " ".join(process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"nothing runs {words}")


def kill_host(runs: Path) -> None:
    below("probe.torchrun.host").kill()


def kill_fork_server(runs: Path) -> None:
    below("multiprocessing.forkserver").kill()


def stop_fork_server(runs: Path) -> None:
    below("multiprocessing.forkserver").send_signal(signal.SIGSTOP)


def kill_agent(runs: Path) -> None:
    below("probe.torchrun.agent").kill()


def delete_run_directory(runs: Path) -> None:
    for run in runs.glob("autotune-probe-*"):
        shutil.rmtree(run)


@contextmanager
def once_marked(mark: Path, happens: Happening, runs: Path) -> Iterator[None]:
    """Have something happen as soon as a rank has left its mark."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        happens(runs)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def confined(folder: Path, mounts: Sequence[tuple[str, str]], *overrides: str, **environ: str) -> Run:
    """Start a sweep in a mount namespace of its own, where tiny file systems lie over some folders.

    Args:
        folder: where it runs.
        mounts: folder and size of each.
        overrides: of the sweep.
        environ: more variables.
    """
    script = "".join(f"mount -t tmpfs -o size={size} none {place} && " for place, size in mounts)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{script}exec "$@"', "sh"]
    return start([*command, sys.executable, "-m", "autotune", *overrides], folder, **environ)


def may_mount() -> bool:
    """Whether this user may mount file systems."""
    return os.geteuid() == 0
