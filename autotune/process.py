"""Processes by pid and start, so that a later one with the same number is never taken for them, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_REAP_S = 5.0


def this_place() -> str:
    """Where processes are seen: this boot of this kernel and this process namespace.

    Host names will not do: containers share one without seeing each other's processes, and machines from one image
    may have the same.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, for as long as the machine is up.

    Attributes:
        started: clock ticks between boot and its start (field 22 of /proc/PID/stat): unlike a time of day it does
            not move when the clock is set.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this number now; None where there is none, or it is only waiting to be reaped."""
        fields = _fields(pid)
        return None if fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    @classmethod
    def here(cls) -> Identity:
        """This process."""
        found = cls.of(os.getpid())
        assert found is not None
        return found

    def alive(self) -> bool:
        """Whether it still runs."""
        return Identity.of(self.pid) == self

    def stopped(self) -> bool:
        """Whether it runs and a signal has stopped it (SIGSTOP, a debugger)."""
        return self.alive() and _fields(self.pid)[0] in (b"T", b"t")


def _fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third, the state, on; state X (dead) alone where there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return [b"X"]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends: what a killed rank had started is found here."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The processes whose parent is this one, less multiprocessing's tracker."""
    return {child.pid for child in psutil.Process().children() if not _is_tracker(child)}


def end_orphans(known: set[int]) -> None:
    """End and reap every child of this process that is not among the known, with all that descends from it."""
    deadline = time.monotonic() + _REAP_S
    while (strangers := children() - known) and time.monotonic() < deadline:
        for pid in strangers:
            kill_tree(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that descends from it, deepest last to first so that nobody is adopted meanwhile."""
    try:
        root = psutil.Process(pid)
        processes = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        _kill(process)


def kill_session(leader: int) -> None:
    """SIGKILL a process, what descends from it and what is left of its session: orphans whose parents ended first."""
    kill_tree(leader)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader:
                _kill(psutil.Process(pid))


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if not _is_tracker(process):
            process.kill()


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's tracker, which ends by itself after it has tidied shared memory."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
