"""Every fault that a rank can have, in every phase where it makes sense, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.probe.measurement import Outcome
from autotune.workload.phase import Phase
from tests.probe.torchrun.faulty import memory_controller


@dataclass(frozen=True, slots=True)
class Row:
    """One fault, struck on one rank of two (see faulty.py).

    Attributes:
        about: what it is, for people.
        phase: that the measurement must name; None where nothing went wrong.
        message: words that its message must have.
    """

    kind: str
    at: Phase
    about: str
    outcome: Outcome
    phase: Phase | None
    message: str = ""

    @property
    def lasts(self) -> bool:
        """Whether only the deadline ends it."""
        return self.outcome is Outcome.TIMEOUT


ANYWHERE = (
    ("oom", "device out of memory", Outcome.OOM_DEVICE, ""),
    ("kill", "SIGKILL", Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
    ("stop", "SIGSTOP", Outcome.TIMEOUT, "rank 1 was not done by the deadline"),
    ("raises", "an exception", Outcome.CRASHED, "RuntimeError: the model says no"),
    ("vanish", "exit 0 without a result", Outcome.CRASHED, "rank 1 ended without a result"),
    ("orphan", "death with open connections", Outcome.CRASHED, "rank 1 was killed by SIGKILL"),
    ("disk_full", "a disk without room", Outcome.INFRA, "No space left on device"),
)
KERNEL = ("kernel", "the kernel's OOM kill", Outcome.OOM_HOST, "the kernel killed rank 1")

MATRIX = [
    *(
        Row(kind, phase, about, outcome, phase, message)
        for kind, about, outcome, message in (*ANYWHERE, *([KERNEL] if memory_controller() else []))
        for phase in Phase
    ),
    Row("not_finite", Phase.FORWARD, "a loss that is NaN", Outcome.DIVERGED, Phase.FORWARD, "is nan"),
    Row("not_finite", Phase.BACKWARD, "gradients that are NaN", Outcome.DIVERGED, Phase.BACKWARD, "skipped 40 steps"),
    Row("torn", Phase.LOAD, "a truncated result file", Outcome.INFRA, None, "rank 1 could not write its result"),
    Row("told", Phase.STEP, "SIGKILL after the result is written", Outcome.OK, None),
    Row("thread", Phase.STEP, "a thread that never ends", Outcome.OK, None),
    Row("clock_set_back", Phase.FORWARD, "the clock set back an hour", Outcome.OK, None),
    Row("says_error", Phase.FORWARD, 'stderr that says "Error"', Outcome.OK, None),
    Row("refuses", Phase.INIT, "DeepSpeed refuses the config", Outcome.INVALID, Phase.INIT, "ValueError"),
]
