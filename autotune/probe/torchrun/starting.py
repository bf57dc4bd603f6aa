"""Starting what takes its time: logs, waiting with news of what goes on, compiling DeepSpeed's operations."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from autotune.errors import InfraError
from autotune.probe.torchrun import preload
from autotune.probe.torchrun.launcher import START_S, AgentReport, Tell, leashed
from autotune.probe.torchrun.rundir import full_place
from autotune.process import kill_tree


def log_file() -> IO[bytes]:
    """A file for what processes print; gone when it is closed."""
    return tempfile.TemporaryFile("w+b", prefix="autotune-log-")


def last_line(log: IO[bytes]) -> str:
    """What a process said last, or what kept it from saying anything."""
    if place := full_place():
        return f"{place} is full"
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def wait_telling(
    answer: Callable[[], AgentReport | None], alive: Callable[[], bool], status: Path, tell: Tell
) -> AgentReport | None:
    """Wait for an answer, for the end of who should give it, or for `START_S`; pass on what it says meanwhile."""
    told, deadline = "", time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (found := answer()) is not None:
            return found
        if (now := status.read_text()) != told:
            told = now
            tell(now)
        if not alive():
            return None
    return None


def describe_here(directory: Path, environ: dict[str, str]) -> None:
    """Run autotune.probe.torchrun.describe on a directory, in a process of its own."""
    command = [sys.executable, "-m", "autotune.probe.torchrun.describe", str(directory)]
    subprocess.run(leashed(command), env=environ, check=False, capture_output=True, timeout=START_S)


def compile_operations(environ: dict[str, str], tell: Tell) -> None:
    """Compile DeepSpeed's C++ operations in a process of its own, unless they are.

    Raises:
        InfraError: they cannot be compiled, or torch and DeepSpeed cannot be imported.
    """
    with tempfile.NamedTemporaryFile("w", prefix="autotune-status-") as status, log_file() as log:
        process = subprocess.Popen(
            leashed([sys.executable, "-m", "autotune.probe.torchrun.preload"]),
            env=environ | {preload.STATUS_FILE: status.name},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_telling(lambda: time.sleep(0.2), lambda: process.poll() is None, Path(status.name), tell)
        finally:
            kill_tree(process.pid)
            process.wait()
        if process.returncode != 0:
            raise InfraError(
                f"torch and DeepSpeed could not be prepared: {last_line(log)}",
                "run `python -m autotune.probe.torchrun.preload` with TORCH_EXTENSIONS_DIR set to see more",
            )
