"""Who tunes a study: one process at a time, known by pid, start time and host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

LEASE_S = 900.0
"""How long an owner may go unheard before another host takes over: longer than most probes (the search renews the
lease before each and makes it longer where a probe may take longer), shorter than the patience of someone whose job
was preempted and goes on elsewhere. On the same host the process table is asked instead."""

_CLOCK_STEP_S = 2.0  # a process's start is kept by the kernel relative to boot, so a clock correction moves it


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that tunes a study.

    Attributes:
        started: when the process started, seconds since the epoch; tells it from a later one with the same pid.
        until: to whom cannot look at the process, it counts as alive until then, seconds since the epoch.
    """

    pid: int
    started: float
    host: str
    until: float

    @classmethod
    def here(cls, lease_s: float) -> Owner:
        """This process."""
        return cls(os.getpid(), psutil.Process().create_time(), socket.gethostname(), time.time() + lease_s)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Owner | None:
        """The owner in a row of `autotune_studies`, None where nobody tunes it."""
        if row["owner_pid"] is None:
            return None
        return cls(row["owner_pid"], row["owner_started"], row["owner_host"], row["owner_until"])

    def row(self) -> dict[str, Any]:
        """The columns that hold an owner."""
        return {
            "owner_pid": self.pid,
            "owner_started": self.started,
            "owner_host": self.host,
            "owner_until": self.until,
        }

    def same_process(self, other: Owner) -> bool:
        """Whether both are one process."""
        return (self.pid, self.host) == (other.pid, other.host) and abs(self.started - other.started) <= _CLOCK_STEP_S

    def is_alive(self) -> bool:
        """Whether the process still runs, as far as can be known from here."""
        if self.host != socket.gethostname():
            return time.time() < self.until
        try:
            process = psutil.Process(self.pid)
            started: float = process.create_time()
            zombie: bool = process.status() == psutil.STATUS_ZOMBIE
            return abs(started - self.started) <= _CLOCK_STEP_S and not zombie
        except psutil.NoSuchProcess:
            return False


NOBODY: dict[str, Any] = dict.fromkeys(("owner_pid", "owner_started", "owner_host", "owner_until"))
"""The columns of a study that nobody tunes."""
