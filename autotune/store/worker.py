"""Who works on a study: a process, known by host, pid and start time, and whether it is still there."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import RowMapping

from autotune.process import Identity, this_place


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that works on a study.

    Attributes:
        id: no two workers ever have the same.
        family: workers that one command started have it in common.
        host: for people.
        place: see this_place.
        pid: the process.
        started: when the process started, clock ticks since boot; tells it from a later one with the same pid.
    """

    id: str
    family: str
    host: str = field(default_factory=socket.gethostname)
    place: str = field(default_factory=this_place)
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=lambda: float(Identity.here().started))

    @classmethod
    def here(cls, family: str) -> Worker:
        """This process, as a new worker."""
        return cls(uuid.uuid4().hex, family)

    @classmethod
    def of(cls, row: RowMapping) -> Worker:
        """The worker in a row of `autotune_workers`."""
        return cls(row["id"], row["family"], row["host"], row["place"], row["pid"], row["process_started"])

    def row(self) -> dict[str, Any]:
        """The columns that hold a worker."""
        return {
            "id": self.id,
            "family": self.family,
            "host": self.host,
            "place": self.place,
            "pid": self.pid,
            "process_started": self.started,
        }

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"

    def is_seen(self) -> bool | None:
        """Whether the process still runs; None where it cannot be looked at from here."""
        if self.place != this_place():
            return None
        return Identity(self.pid, int(self.started)).alive()
