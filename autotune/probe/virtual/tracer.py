"""The process that traces: `python -m autotune.probe.virtual.tracer`, one job per line on stdin, replies on stdout.

It imports torch and DeepSpeed once, computes nothing, and forks a child for every job, one per processor at a time.
The child builds and initialises the engine and forks again for every run of its job, so that runs share what they
have in common. A run ends as one tape file.
"""

from __future__ import annotations

import gc
import json
import os
import select
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.torchrun.leash import die_with_parent
from autotune.workload.phase import Phase
from autotune.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Job:
    """One engine on one rank, and what is to be run on it.

    Attributes:
        workload, machine: what is trained, and where.
        deepspeed_config: what DeepSpeed gets.
        rank: which rank.
        micro_steps: of each of the two optimizer steps.
        runs: the candidate and the file for the tape of each run. Candidates differ in micro-batch and checkpointing.
        working_directory: where a custom model's factory is imported from.
    """

    workload: Workload
    machine: Machine
    deepspeed_config: dict[str, Any]
    rank: int
    micro_steps: int
    runs: list[tuple[Candidate, str]]
    working_directory: str = field(default_factory=os.getcwd)

    def to_json(self) -> str:
        """One line."""
        values = asdict(self) | {
            "workload": self.workload.to_dict(),
            "machine": self.machine.to_dict(),
            "runs": [[candidate.to_dict(), path] for candidate, path in self.runs],
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The job that `to_json` wrote."""
        values = json.loads(line)
        values["workload"] = Workload.from_dict(values["workload"])
        values["machine"] = Machine.from_dict(values["machine"])
        values["runs"] = [(Candidate.from_dict(candidate), path) for candidate, path in values["runs"]]
        return cls(**values)


def error_path(path: str) -> Path:
    """Where a run writes why there is no tape."""
    return Path(path).with_suffix(".error")


def main() -> None:
    """Serve jobs until stdin ends."""
    die_with_parent()
    _import()
    print(json.dumps({"ready": True}), flush=True)
    running: dict[int, int] = {}
    waiting: list[tuple[int, str]] = []
    number, buffer, ended = 0, b"", False
    most = len(os.sched_getaffinity(0))
    while running or waiting or not ended:
        ready, _, _ = select.select([] if ended else [0], [], [], 0.02 if running else None)
        if ready:
            data = os.read(0, 1 << 16)
            ended, buffer = not data, buffer + data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                waiting.append((number, line.decode()))
                number += 1
        while waiting and len(running) < most:
            index, text = waiting.pop(0)
            running[_fork(lambda text=text: _answer(text))] = index  # type: ignore[misc]
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            print(json.dumps({"done": running.pop(pid), "status": status}), flush=True)


def _import() -> None:
    """Import what every job needs, in the process that is forked."""
    import autotune.probe.virtual.session  # noqa: F401
    from autotune.probe.torchrun import preload

    preload.prepare(operations=False)
    gc.collect()
    gc.freeze()  # what is here now is shared with every child, and never garbage


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        work()
        code = 0
    finally:
        # Not the interpreter's own end, which waits for threads that a fork does not have.
        sys.stderr.flush()
        os._exit(code)


def _answer(line: str) -> None:
    """Do what one line asks for: describe a model, or trace."""
    request = json.loads(line)
    if "describe" in request:
        from autotune.probe.torchrun.describe import main as describe

        describe(request["describe"])
    else:
        _serve(Job.from_json(line))


def _serve(job: Job) -> None:
    """Run a job's runs, one after the other."""
    from autotune.probe.virtual.session import Session

    sys.path.insert(0, job.working_directory)
    session = Session(job)
    failed = _failing(session, session.start)
    for candidate, path in job.runs:
        if failed is not None:
            write_error(path, failed)
            continue

        def run(candidate: Candidate = candidate, path: str = path) -> None:
            if (failure := _failing(session, lambda: session.run(candidate, path))) is not None:
                write_error(path, failure)

        _, status = os.waitpid(_fork(run), 0)
        if status and not Path(path).exists() and not error_path(path).exists():
            write_error(path, {"kind": "crashed", "phase": str(session.now), "message": f"the tracer died ({status})"})


def _failing(session: Any, work: Callable[[], None]) -> dict[str, Any] | None:
    """Do some work; where it fails, say how."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever a model, DeepSpeed or torch raises is this candidate's outcome
        return failure_of(error, str(session.now))
    return None


def failure_of(error: Exception, phase: str) -> dict[str, Any]:
    """What an error means: the candidate is invalid, cannot be traced, or crashes."""
    from autotune.probe.torchrun.failure import classify
    from autotune.probe.virtual.compute import NotTraceable
    from autotune.workload.build import FactoryError
    from autotune.workload.checkpointing import CheckpointingError

    if isinstance(error, NotTraceable):
        return {"kind": "invalid", "phase": phase, "message": f"cannot be traced: {error}"}
    if isinstance(error, FactoryError | CheckpointingError):
        return {"kind": "invalid", "phase": phase, "message": str(error)}
    lines = str(error).strip().splitlines() or [""]
    return {
        "kind": classify(error, Phase(phase), full=False, on_cpu=False),
        "phase": phase,
        "message": f"{type(error).__name__}: {lines[0][:500]}",
        "trace": "".join(traceback.format_exception(error))[-8000:],
    }


def write_error(path: str, failure: dict[str, Any]) -> None:
    """Write why a run has no tape, whole or not at all."""
    part = error_path(path).with_suffix(".part")
    part.write_text(json.dumps(failure))
    os.replace(part, error_path(path))


if __name__ == "__main__":
    main()
