"""What the tracing process is asked for, and what it leaves where there is no tape: why."""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
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


def failure_of(error: Exception | SystemExit, phase: str) -> dict[str, Any]:
    """What an error means: the candidate is invalid, cannot be traced, or crashes."""
    from autotune.probe.torchrun.failure import classify
    from autotune.probe.virtual.compute import NotTraceable
    from autotune.workload.build import FactoryError
    from autotune.workload.checkpointing import CheckpointingError

    if isinstance(error, SystemExit):
        return {"kind": "crashed", "phase": phase, "message": f"SystemExit: {error}"}
    if isinstance(error, NotTraceable):
        return {"kind": "invalid", "phase": phase, "message": f"cannot be traced: {error}"}
    if isinstance(error, FactoryError | CheckpointingError):
        return {"kind": "invalid", "phase": phase, "message": str(error)}
    return {
        # memory that runs out for real is that of the machine here, and says nothing of the one planned for
        "kind": classify(error, Phase(phase), full=False, on_cpu=True),
        "phase": phase,
        "message": f"{type(error).__name__}: {_sentence(error)}".rstrip(": "),
        "trace": "".join(traceback.format_exception(error))[-8000:],
    }


def _sentence(error: Exception) -> str:
    """An error's first line; of pydantic, which DeepSpeed's config is read with, all that makes a sentence."""
    lines = [line.strip().partition(" [type=")[0] for line in str(error).strip().splitlines()] or [""]
    return (": ".join(lines[:3]) if type(error).__name__ == "ValidationError" else lines[0])[:500]


def write_error(path: str, failure: dict[str, Any]) -> None:
    """Write why a run has no tape, whole or not at all."""
    part = error_path(path).with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(failure))
    os.replace(part, error_path(path))
