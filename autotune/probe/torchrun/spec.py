"""The files of one probe: the spec that every rank reads, the result that each rank writes, its pulse in between."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import GIB, Machine
from autotune.process import Identity
from autotune.workload.phase import Phase
from autotune.workload.workload import Workload

SCHEMA = 1
CANNOT_WRITE = os.EX_IOERR
"""The exit code of a rank that could not write its result."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the agents of several nodes meet.

    Attributes:
        endpoint: host:port of the first node's store.
        identifier: of this probe; agents of another one are no peers.
        first: whether it is this node that opens the store.
        address: of this node, as its peers reach it.
    """

    endpoint: str
    identifier: str
    first: bool
    address: str


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """All that a rank needs to know; plain data, so that ranks need no Hydra, Optuna or SQLAlchemy.

    Attributes:
        directory: the run directory, where results go.
        working_directory: where the user stands: a custom model's factory is imported from there.
        deepspeed_config: what DeepSpeed gets, unchanged.
        parameters: of the model, where known; says how many bytes offloading moves to the host.
        warmup_steps, steps: unmeasured and measured optimizer steps.
        sampled_accumulation: time windows of 2 and of 4 micro-steps and solve for a whole step; steps that are not
            measured have 2, which is all that memory can tell apart from more.
        stop_below_tokens_per_s: see ProbeRequest.
        devices: those that the ranks of a node share out, as CUDA counts them; None for the first ones.
        threads: per rank.
        processors: of each local rank, by local rank.
        host_reserve_gib: `probe.host_reserve_gib`: when a node has less memory left than that, its ranks are ended.
        rendezvous: where the nodes' agents meet; None where there is one node.
    """

    directory: str
    working_directory: str
    candidate: Candidate
    workload: Workload
    machine: Machine
    deepspeed_config: dict[str, Any]
    parameters: int | None
    warmup_steps: int
    steps: int
    sampled_accumulation: bool
    stop_below_tokens_per_s: float | None
    threads: int
    processors: list[list[int]]
    host_reserve_gib: float | None
    rendezvous: Rendezvous | None = None
    devices: list[int] | None = None

    @property
    def host_limit_bytes(self) -> int:
        """What the ranks of one node may hold of its memory; 0 where that is not known."""
        return int(self.machine.host_memory_gib * GIB)

    @property
    def offloaded_bytes(self) -> int:
        """At most so many bytes of a rank will belong to the host, from the model's size.

        Per parameter of the partition: fp32 master, two states and gradient, and DeepSpeed's 16-bit and gradient
        buffers beside them (20); 4 for an offloaded parameter.
        """
        candidate, parameters = self.candidate, self.parameters or 0
        share = -(-parameters // self.machine.world_size)
        return share * (20 * (candidate.offload_optimizer == "cpu") + 4 * (candidate.offload_param == "cpu"))

    @property
    def untimed_micro_steps(self) -> int:
        """Micro-steps of an optimizer step that is not measured."""
        return 2 if self.sampled_accumulation else self.candidate.accumulation

    @property
    def micro_steps(self) -> int:
        """Micro-steps of the whole probe: two taped steps, the rest of the warm-up, the measured ones."""
        timed = 2 + 4 if self.sampled_accumulation else self.candidate.accumulation
        return (self.warmup_steps + 1) * self.untimed_micro_steps + self.steps * timed

    def write(self) -> Path:
        """Write `spec.json` into the run directory and return its path."""
        path = Path(self.directory) / "spec.json"
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values |= {
            "schema": SCHEMA,
            "candidate": self.candidate.to_dict(),
            "workload": self.workload.to_dict(),
            "machine": self.machine.to_dict(),
            "rendezvous": dataclasses.asdict(self.rendezvous) if self.rendezvous else None,
        }
        path.write_text(json.dumps(values))
        return path

    @classmethod
    def read(cls, path: str | Path) -> ProbeSpec:
        """The spec that `write` wrote."""
        values = json.loads(Path(path).read_text())
        values.pop("schema")
        values["candidate"] = Candidate.from_dict(values["candidate"])
        values["workload"] = Workload.from_dict(values["workload"])
        values["machine"] = Machine.from_dict(values["machine"])
        values["rendezvous"] = Rendezvous(**values["rendezvous"]) if values["rendezvous"] else None
        return cls(**values)


@dataclass(slots=True)
class RankResult:
    """What one rank has to say at its end, good or bad. Bytes and seconds.

    Attributes:
        failure: how it failed: oom_device, oom_host, invalid, diverged, crashed or infra; None when it did not.
        peer_lost: what it saw is only that another rank was gone.
        phase: where it failed.
        message: the exception's type and first line.
        trace: its traceback.
        needed_bytes: for an OOM, what was in use and what was asked for beside it.
        stopped: it ended early because it could not win.
        at: seconds between the moment when the ranks had found each other and this one's end, so that ends on
            several machines can be told apart in time, whatever their clocks say.
        step_times_s: the measured steps; with sampled accumulation each is solved from a pair of windows.
        losses, gradient_norms: of every step that counts; DeepSpeed keeps no norm in some configurations.
        memory: phase → meters.
        steps: what the meters say after each measured step (see Meters.after_step), each a list over the steps.
        pace_s: each round of the work in pace.py.
        unmeasured_s: warm-up and tape steps; measured_s: the measured steps.
    """

    rank: int
    failure: str | None = None
    peer_lost: bool = False
    phase: str | None = None
    message: str | None = None
    trace: str | None = None
    needed_bytes: int | None = None
    stopped: bool = False
    at: float = 0.0
    step_times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float | None] = field(default_factory=list)
    skipped_steps: int = 0
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: dict[str, list[int]] = field(default_factory=dict)
    pace_s: list[float] = field(default_factory=list)
    unmeasured_s: float = 0.0
    measured_s: float = 0.0
    timeline_s: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: str | Path) -> None:
        """Write `rank<r>.json`, whole or not at all."""
        path = Path(directory) / f"rank{self.rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}))
        os.replace(part, path)

    @classmethod
    def read(cls, directory: str | Path, rank: int) -> RankResult | None:
        """The result that `write` wrote; None when there is none, or it is not whole."""
        try:
            values = json.loads((Path(directory) / f"rank{rank}.json").read_text())
            if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
                return None
            return cls(**values)
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def torn(cls, directory: str | Path, rank: int) -> bool:
        """Whether there is a result that is not whole."""
        return (Path(directory) / f"rank{rank}.json").exists() and cls.read(directory, rank) is None


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said of itself: its process, its phase, and how many phases it has begun."""

    process: Identity
    phase: Phase
    progress: int


_PHASES = list(Phase)


class Pulse:
    """A few bytes that a rank keeps current in a mapped file, so that its phase is known even when it is killed.

    Writing is a store to memory: it costs nothing in a timed step.
    """

    _LAYOUT = struct.Struct("<qqqq")  # pid and start of the process, phase index, phases begun so far

    def __init__(self, directory: str | Path, rank: int) -> None:
        path = Path(directory) / f"rank{rank}.pulse"
        path.write_bytes(bytes(self._LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._LAYOUT.size)
        process = Identity.here()
        self._values = [process.pid, process.started, 0, 0]
        self._store()

    def phase(self, phase: Phase) -> None:
        """Say what is going on."""
        self._values[2] = _PHASES.index(phase)
        self._values[3] += 1
        self._store()

    def _store(self) -> None:
        self._LAYOUT.pack_into(self._map, 0, *self._values)

    @classmethod
    def read(cls, directory: str | Path, rank: int) -> Beat | None:
        """What a rank last said; None when it has not started."""
        try:
            values = cls._LAYOUT.unpack((Path(directory) / f"rank{rank}.pulse").read_bytes())
        except (OSError, struct.error):
            return None
        pid, started, phase, progress = values
        return Beat(Identity(pid, started), _PHASES[phase], progress) if pid else None
