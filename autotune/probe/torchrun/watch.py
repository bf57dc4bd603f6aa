"""Looks after the ranks of one probe from outside: their deadline, their silent ends, their end in any case."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from autotune.probe.torchrun.host_memory import HostMemory
from autotune.probe.torchrun.launcher import AgentReport
from autotune.probe.torchrun.spec import ProbeSpec, Pulse, RankResult

GRACE_S = 6.0
"""After the ranks are gone or killed, the agent has so long to say so before it is killed too, seconds."""
VANISHED_S = 1.0
"""A rank that ended without a result is given so long to be noticed by its agent, seconds."""


class Watch:
    """Watches the ranks of one probe.

    Attributes:
        timed_out: the deadline ended them.
        vanished: the rank whose end without a word ended them all; None where there was none.
    """

    def __init__(self, directory: Path, world: int, deadline_s: float) -> None:
        self._directory, self._world = directory, world
        self._deadline = time.monotonic() + deadline_s
        self._killed_at: float | None = None
        self._gone: tuple[int, float] | None = None
        spec = ProbeSpec.read(directory / "spec.json")
        self._host = HostMemory(spec.host_limit_bytes, spec.host_reserve_bytes)
        self.timed_out = False
        self.vanished: int | None = None

    def overdue(self) -> bool:
        """Kill the ranks at the deadline, when the host is full, or when one went without a word; True if in vain."""
        now = time.monotonic()
        if self._killed_at is not None:
            return now > self._killed_at + GRACE_S
        if now > self._deadline:
            self.timed_out = True
            self.kill()
        elif self._host.look(self._running()):
            self.kill()
        elif self._gone is None:
            rank = self._missing()  # the first to go: its peers may follow before the agent has told
            self._gone = (rank, now) if rank is not None else None
        elif now > self._gone[1] + VANISHED_S:
            self.vanished = self._gone[0]
            self.kill()
        return False

    def report(self, said: AgentReport) -> AgentReport:
        """The agent's report with what was seen from outside."""
        seen = {"timed_out": self.timed_out, "vanished": self.vanished, "hosts": [self._host.report()]}
        return said | seen

    def kill(self) -> None:
        """End every rank of this probe that is still there, and only those."""
        self._killed_at = self._killed_at or time.monotonic()
        for rank in range(self._world):
            if (process := self._process(rank)) is not None:
                kill_tree(process.pid)

    def _process(self, rank: int) -> psutil.Process | None:
        """A rank's process while it is the one that wrote its pulse."""
        pulse = Pulse.read(self._directory, rank)
        if pulse is None:
            return None
        try:
            process = psutil.Process(pulse.pid)
            same = abs(process.create_time() - pulse.create_time) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if same else None

    def _running(self) -> dict[int, int]:
        """Rank → process, of those that are there."""
        processes = {rank: self._process(rank) for rank in range(self._world)}
        return {rank: process.pid for rank, process in processes.items() if process is not None}

    def _missing(self) -> int | None:
        """A rank that has started, is no more, and left no result; None where there is none."""
        return next(
            (
                rank
                for rank in range(self._world)
                if Pulse.read(self._directory, rank) is not None
                and self._process(rank) is None
                and RankResult.read(self._directory, rank) is None
            ),
            None,
        )


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all that descends from it, deepest last to first so that nobody is adopted meanwhile."""
    try:
        root = psutil.Process(pid)
        processes = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            # multiprocessing's tracker ends by itself, after it has removed what the others leave in shared memory
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                process.kill()
        except psutil.NoSuchProcess:
            continue
