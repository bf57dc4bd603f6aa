"""launcher=slurm: every probe is one step (srun) in one allocation; what became of it, Slurm is asked."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path

from autotune.errors import InfraError
from autotune.probe.torchrun.launcher import Tell
from autotune.probe.torchrun.remote.allocation import Allocation, shown, submit
from autotune.probe.torchrun.remote.channel import Channel
from autotune.probe.torchrun.remote.launcher import NODE_PROGRAM, Loss
from autotune.probe.torchrun.remote.wire import Frame
from autotune.settings import Settings

STEP = "autotune-probe"
"""The steps' name, for squeue --steps and scancel."""
_SIGNALLED = 128
"""srun exits with a larger code where a signal ended the node programs: someone cancelled the step."""
_SPARE_MINUTES = 10
"""A step's own time limit is so much longer than what may happen in it: the deadline comes first."""


class SlurmSteps:
    """Starts node programs with srun.

    Args:
        settings: launcher, machine, and the probe's deadline.
        tell: takes a sentence while an allocation is waited for.
    """

    name = "slurm"

    def __init__(self, settings: Settings, tell: Tell) -> None:
        self._settings, self._tell = settings, tell
        self._allocation: Allocation | None = None
        self._step, self._limit_s = "", math.inf

    def prepare(self) -> bool:
        """See Transport."""
        allocation = self._allocation
        if allocation is None and (job := os.environ.get("SLURM_JOB_ID")):
            allocation = Allocation(job)
        if allocation is not None and (end := allocation.ended()):
            allocation.close()
            if not allocation.ours:
                raise InfraError(end, "the same command goes on in another allocation; nothing measured is lost")
            self._tell(f"{end}; another one is asked for")
            allocation = None
        known = allocation is not None and allocation is self._allocation
        self._allocation = allocation or submit(self._settings.launcher, self._settings.machine, self._tell)
        return not known

    def variables(self) -> dict[str, str]:
        """See Transport: srun takes the environment along."""
        return {}

    def open(self, directory: Path, environ: dict[str, str]) -> list[Channel]:
        """See Transport."""
        assert self._allocation is not None
        machine, launcher, probe = self._settings.machine, self._settings.launcher, self._settings.probe
        longest_s = probe.deadline_s * max(1.0, probe.confirm_steps / probe.steps) + launcher.start_s
        command = [
            "srun",
            f"--jobid={self._allocation.job}",
            f"--job-name={STEP}",
            f"--nodes={machine.nodes}",
            f"--ntasks={machine.nodes}",
            "--ntasks-per-node=1",
            "--overlap",  # never wait for the step that this program itself may be
            "--cpu-bind=none",  # ranks choose among all processors of the allocation
            "--kill-on-bad-exit=1",
            "--wait=0",
            f"--time={math.ceil(longest_s / 60) + _SPARE_MINUTES}",
        ]
        if machine.accelerator != "cpu":
            command.append(f"--gpus-per-node={machine.devices_per_node}")
        command += [
            *shlex.split(launcher.srun_args),
            launcher.python or sys.executable,
            "-m",
            NODE_PROGRAM,
        ]
        self._step, self._limit_s = "", math.inf
        log = directory / "agent.log"
        return [Channel.start(command, environ, range(machine.nodes), log)]

    def address(self, hello: Frame) -> str:
        """See Transport: the node's address in Slurm's configuration. The step's time limit is asked for too."""
        assert self._allocation is not None
        names = hello["slurm"]
        self._step = f"{self._allocation.job}.{names['SLURM_STEP_ID']}"
        self._limit_s = seconds(shown("step", self._step).get("TimeLimit", "UNLIMITED"))
        host: str = hello["host"]
        return shown("node", names["SLURMD_NODENAME"]).get("NodeAddr", host)

    def loss(self, channel: Channel, elapsed_s: float) -> Loss:
        """See Transport."""
        assert self._allocation is not None
        if end := self._allocation.ended():
            return Loss(end)
        if elapsed_s >= self._limit_s:
            return Loss(f"Slurm's time limit ended the step {self._step}", timed_out=True)
        code = channel.process.returncode
        step = self._step or "of this probe"
        return Loss(f"the step {step} was cancelled, or one of its nodes was lost (srun exited with code {code})")

    def refusal(self, channel: Channel) -> InfraError | None:
        """See Transport."""
        if channel.process.returncode > _SIGNALLED:
            return None
        return InfraError(
            f"srun could not start the node programs (exit code {channel.process.returncode}): {channel.last_line}",
            "this Python and autotune must be at the same place on every node, or launcher.python names another; "
            "launcher.srun_args takes what your Slurm asks for",
        )

    def close(self) -> None:
        """See Transport."""
        if self._allocation is not None:
            self._allocation.close()
        self._allocation = None


def seconds(limit: str) -> float:
    """A time limit as Slurm writes it ([days-]hours:minutes:seconds), in seconds; infinite for any word."""
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts):
        return math.inf
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return float(total + 86400 * int(days or 0))
