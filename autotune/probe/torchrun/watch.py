"""Looks after the ranks of one probe from outside: their start, their deadline, their silent ends, their end."""

from __future__ import annotations

import time
from pathlib import Path

from autotune.probe.torchrun.host_memory import HostMemory, reserve_bytes
from autotune.probe.torchrun.launcher import AgentReport
from autotune.probe.torchrun.spec import ProbeSpec, Pulse, RankResult
from autotune.process import Identity, kill_session

BEGIN_S = 120.0
"""Ranks that have not begun by then never will, seconds: a cold one imports for 15 s on an idle machine."""
DONE_S = 10.0
"""Ranks that have all left their results have so long to end, seconds: giving back a CUDA context takes some."""
GRACE_S = 6.0
"""After the ranks are gone or killed, the agent has so long to say so before it is killed too, seconds."""
VANISHED_S = 1.0
"""A rank that ended without a result is given so long to be noticed by its agent, seconds."""


class Watch:
    """Watches ranks of one probe on this machine.

    Args:
        directory: the run directory.
        world: ranks in all; those that run elsewhere never begin here.
        deadline_s: from now, seconds.

    Attributes:
        timed_out: the deadline ended them.
        stopped: those that a signal had stopped by then.
        vanished: the rank whose end without a word ended them all; None where there was none.
        trouble: what kept them from running at all, one sentence; None where nothing did.
        ended: they were ended from here.
    """

    def __init__(self, directory: Path, world: int, deadline_s: float) -> None:
        self._directory, self._world = directory, world
        self._began = time.monotonic()
        self._deadline = self._began + deadline_s
        self._processes: dict[int, Identity] = {}
        self._killed_at: float | None = None
        self._gone: tuple[int, float] | None = None
        self._done_at: float | None = None
        spec = ProbeSpec.read(directory / "spec.json")
        self._local = spec.machine.devices_per_node
        self._host = HostMemory(spec.host_limit_bytes, reserve_bytes(spec.host_reserve_gib))
        self.timed_out = False
        self.stopped: list[int] = []
        self.vanished: int | None = None
        self.trouble: str | None = None

    @property
    def ended(self) -> bool:
        """Whether they were ended from here."""
        return self._killed_at is not None

    def overdue(self) -> bool:
        """Kill the ranks where they will not come to an end by themselves; True when their agent outlives that.

        That is: at the deadline, when the host's memory is full, when one of them is gone without a word, when not
        all have begun in time, when all have told their results and do not end, and when their run directory is gone.
        """
        now = time.monotonic()
        if self._killed_at is not None:
            return now > self._killed_at + GRACE_S
        self._look()
        if now > self._deadline:
            self.timed_out = True
            self.stopped = [rank for rank, process in self._processes.items() if process.stopped()]
            self.kill()
        elif not self._directory.exists():
            self.trouble = f"the run directory was deleted under the probe ({self._directory})"
            self.kill()
        elif len(self._processes) < self._local and now > self._began + BEGIN_S:
            some = "not every rank had" if self._processes else "no rank had"
            self.trouble = f"{some} begun after {BEGIN_S:.0f} s"
            self.kill()
        elif self._host.look(self._running()):
            self.kill()
        elif self._done_at is not None:
            if now > self._done_at + DONE_S:  # they have nothing more to do, and something keeps them from ending
                self.kill()
        elif self._all_told():
            self._done_at = now
        elif self._gone is None:
            rank = self._missing()  # the first to go: its peers may follow before the agent has told
            self._gone = (rank, now) if rank is not None else None
        elif now > self._gone[1] + VANISHED_S:
            self.vanished = self._gone[0]
            self.kill()
        return False

    def report(self, said: AgentReport) -> AgentReport:
        """The agent's report with what was seen from outside."""
        seen: dict[str, object] = {
            "timed_out": self.timed_out,
            "stopped": self.stopped,
            "vanished": self.vanished,
            "hosts": [self._host.report()],
        }
        return said | seen | ({"error": self.trouble} if self.trouble else {})

    def kill(self) -> None:
        """End every rank of this probe that is still there, and only those."""
        self._killed_at = self._killed_at or time.monotonic()
        self._look()
        for process in self._processes.values():
            if process.alive():
                kill_session(process.pid)

    @property
    def begun(self) -> bool:
        """Whether every rank of this node has."""
        self._look()
        return len(self._processes) == self._local

    def _look(self) -> None:
        """Find out about ranks that have begun: what is known stays known when the run directory is gone."""
        for rank in range(self._world):
            if rank not in self._processes and (beat := Pulse.read(self._directory, rank)) is not None:
                self._processes[rank] = beat.process

    def _running(self) -> dict[int, int]:
        """Rank → process, of those that are there."""
        return {rank: process.pid for rank, process in self._processes.items() if process.alive()}

    def _all_told(self) -> bool:
        """Whether every rank of this node has left its result."""
        told = (RankResult.read(self._directory, rank) is not None for rank in self._processes)
        return len(self._processes) == self._local and all(told)

    def _missing(self) -> int | None:
        """A rank that has begun, is no more, and left no result; None where there is none."""
        return next(
            (
                rank
                for rank, process in self._processes.items()
                if not process.alive() and RankResult.read(self._directory, rank) is None
            ),
            None,
        )
