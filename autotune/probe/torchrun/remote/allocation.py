"""An allocation of Slurm's: the one that this process runs in, or one that is submitted, waited for and given back."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import time

from autotune.errors import InfraError
from autotune.machine.machine import Machine
from autotune.probe.torchrun.launcher import Tell
from autotune.settings import LauncherSettings

JOB = "autotune"
ANSWER_S = 60.0
"""Slurm's commands may take so long, seconds; a busy controller takes its time."""
_POLL_S = 2.0
_COMPLETING_S = 10.0
"""What an allocation that is being ended has died of is known so much later at the latest, seconds."""
_TO_COME = ("PENDING", "CONFIGURING")
_THERE = ("RUNNING", "SUSPENDED")


class Allocation:
    """Some nodes of Slurm's.

    Args:
        job: its number.
        leash: a process that cancels it at the end of its own input, which we hold; None where it is not ours.
    """

    def __init__(self, job: str, leash: subprocess.Popen[bytes] | None = None) -> None:
        self.job, self._leash = job, leash

    @property
    def ours(self) -> bool:
        """Whether we submitted it."""
        return self._leash is not None

    def record(self) -> dict[str, str]:
        """What Slurm knows of it; nothing where it has forgotten it."""
        return shown("job", self.job)

    def ended(self) -> str:
        """A sentence about its end; empty while it is there, or while Slurm does not answer."""
        deadline = time.monotonic() + _COMPLETING_S
        while (record := self.record()).get("JobState") == "COMPLETING" and time.monotonic() < deadline:
            time.sleep(0.2)
        if not record and _asked("sinfo", "--noheader").returncode != 0:
            return ""
        state = record.get("JobState", "unknown to Slurm by now")
        reason = record.get("Reason", "None")
        return "" if state in _THERE else f"Slurm's allocation {self.job} is over ({state}{_because(reason)})"

    def wait(self, tell: Tell) -> None:
        """Wait until its nodes are there, with news.

        Raises:
            InfraError: it ended before it began.
        """
        told = ""
        while (state := (record := self.record()).get("JobState", "")) in _TO_COME:
            news = f"waiting for Slurm's allocation {self.job}: {state}{_because(record.get('Reason', 'None'))}"
            if news != told:
                tell(news)
                told = news
            time.sleep(_POLL_S if told else 0)
        if state not in _THERE:
            raise InfraError(
                f"Slurm's allocation {self.job} ended before it began ({state or 'unknown to Slurm'})",
                "see launcher.partition, launcher.account, launcher.time and launcher.sbatch_args",
            )

    def close(self) -> None:
        """Give it back, where it is ours."""
        if self._leash is None:
            return
        assert self._leash.stdin is not None
        with contextlib.suppress(OSError):
            self._leash.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._leash.wait(ANSWER_S)


def submit(launcher: LauncherSettings, machine: Machine, tell: Tell) -> Allocation:
    """Submit an allocation that only holds its nodes, and wait for it.

    A process of its own session cancels it as soon as this one is gone, however it goes; should the whole host go,
    launcher.time ends it.

    Raises:
        InfraError: Slurm refuses it, or it ends before it begins.
    """
    command = [
        "sbatch",
        "--parsable",
        f"--job-name={JOB}",
        f"--nodes={machine.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",  # neighbours would disturb what is timed
        "--no-requeue",
        "--output=/dev/null",
        f"--time={launcher.time}",
    ]
    command += [f"--gpus-per-node={machine.devices_per_node}"] if machine.accelerator != "cpu" else []
    command += [f"--partition={launcher.partition}"] if launcher.partition else []
    command += [f"--account={launcher.account}"] if launcher.account else []
    job = slurm(*command, *shlex.split(launcher.sbatch_args), "--wrap", "exec sleep infinity").strip().partition(";")[0]
    leash = subprocess.Popen(
        ["sh", "-c", 'read -r _; exec scancel "$0"', job],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    allocation = Allocation(job, leash)
    with contextlib.ExitStack() as unless_there:
        unless_there.callback(allocation.close)
        allocation.wait(tell)
        unless_there.pop_all()
    return allocation


def slurm(*command: str) -> str:
    """What a command of Slurm's answers.

    Raises:
        InfraError: there is no such command, Slurm cannot be reached, or it refuses.
    """
    answer = _asked(*command)
    if answer.returncode != 0:
        said = answer.stderr.strip().splitlines() or ["it said nothing"]
        raise InfraError(
            f"Slurm's {command[0]} failed (exit code {answer.returncode}): {said[-1]}",
            "see whether sinfo answers here, and launcher.partition, launcher.account and launcher.sbatch_args",
        )
    return answer.stdout


def shown(kind: str, name: str) -> dict[str, str]:
    """What `scontrol show` says of a job, a step or a node; nothing where it says nothing."""
    answer = _asked("scontrol", "show", kind, "--oneliner", name)
    return fields(answer.stdout) if answer.returncode == 0 else {}


def fields(record: str) -> dict[str, str]:
    """The fields of a record that scontrol printed on one line."""
    pairs = (word.partition("=") for word in record.split() if "=" in word)
    return {name: value for name, _, value in pairs}


def _asked(*command: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise InfraError(
            f"launcher=slurm, and there is no {command[0]} here",
            "run it where Slurm's commands are, or start with launcher=hosts or, on one machine, launcher=warm",
        )
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise InfraError(
            f"Slurm's {command[0]} did not answer within {ANSWER_S:.0f} s", "see whether sinfo answers here"
        ) from None


def _because(reason: str) -> str:
    return "" if reason == "None" else f", {reason}"
