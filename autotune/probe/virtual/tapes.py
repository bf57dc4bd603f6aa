"""The tape of any candidate from as few traces as exactness allows, kept on disk.

What a trace depends on is its key. Depth is extended where blocks repeat (depth.py), and large micro-batches are made
of two small ones (affine.py); where either does not hold, the candidate is traced as it is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import InfraError
from autotune.machine.machine import Machine
from autotune.probe.virtual.affine import NotAffineError, at_micro_batch
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.depth import NotExtendable, extend, least_depth
from autotune.probe.virtual.job import Job, error_path
from autotune.probe.virtual.tape import Tape
from autotune.workload.workload import Workload

DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "num_layers")
PERIODS = {"none": 1, "all": 1, "half": 2, "quarter": 4}
TRACED = (2, 4)
"""Larger micro-batches are made of these two; 1 is a program of its own, since torch treats dimensions of size 1 so."""
MOST_RUNS = 6
"""At most so many runs share an engine: with more, processors would be idle at the end."""


class Untraceable(LookupError):
    """Raised when there is no tape of a candidate: DeepSpeed refuses it, or the model cannot be traced.

    Attributes:
        kind: the outcome, invalid or crashed.
        phase: where.
        message: why, one sentence.
        detail: what else is known.
    """

    def __init__(self, failure: dict[str, Any]) -> None:
        super().__init__(failure["message"])
        self.kind, self.phase, self.message = failure["kind"], failure["phase"], failure["message"]
        self.detail = {name: failure[name] for name in failure.keys() - {"kind", "phase", "message"}}


@dataclass(frozen=True, slots=True)
class Program:
    """A candidate with its config, on one rank.

    Attributes:
        candidate: gives micro-batch, checkpointing, number format.
        config: the whole DeepSpeed config, as JSON.
        rank: which rank.
    """

    candidate: Candidate
    config: str
    rank: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One trace to be made: a program at a micro-batch and a depth (None: the model's own)."""

    program: Program
    micro_batch: int
    depth: int | None


class Tapes:
    """Makes and keeps tapes.

    Args:
        workload, machine: what is trained, and where.
        tracer: makes traces; without one, what is not there is an error.
        source: a digest of a custom model's source, None for other models.
        folder: of the cache.
    """

    def __init__(
        self, workload: Workload, machine: Machine, tracer: Tracer | None, source: str | None, folder: Path
    ) -> None:
        self._workload, self._machine, self._tracer = workload, machine, tracer
        self._common = {
            "workload": workload.to_dict(),
            "machine": machine.to_dict(),
            "source": source,
            "code": code_digest(),
        }
        self._folder = folder
        self._fits: set[Path] = set()
        self._crashes: dict[Path, dict[str, Any]] = {}
        self.blocks, self.block_parameters, self.parameters = 0, 0, 0

    def knows(self, blocks: int, block_parameters: int, parameters: int) -> None:
        """Learn how many alike blocks the model has, how many parameters the smallest of them, and how many in all."""
        self.blocks, self.block_parameters, self.parameters = blocks, block_parameters, parameters

    def key(self, *parts: object) -> str:
        """A digest of everything that a result depends on, and of what tells it from others."""
        text = json.dumps([self._common, *parts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def needed(self, program: Program) -> list[Trace]:
        """The traces that a program's tape is made of."""
        candidate = program.candidate
        micro_batches = [candidate.micro_batch] if candidate.micro_batch <= TRACED[-1] else [*TRACED]
        depths: list[int | None] = [*self._depths(program)] or [None]
        return [Trace(program, micro_batch, depth) for depth in depths for micro_batch in micro_batches]

    def trace(self, traces: Iterable[Trace], on_progress: Callable[[int, int], None] = lambda done, of: None) -> int:
        """Make the traces that are not there yet, and are worth it: where less is too much already, more is too.

        Returns:
            How many were made.

        Raises:
            LookupError: traces are missing, and there is no tracer.
            InfraError: the tracing process does not start, or dies.
        """
        missing: dict[str, Trace] = {}
        for trace in traces:
            path = self._path(trace)
            known = path.exists() or error_path(str(path)).exists() or path in self._crashes
            if not known and self._too_much(trace) is None:
                missing.setdefault(str(path), trace)
        if missing and self._tracer is None:
            raise LookupError("not traced")
        groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
        for text, trace in missing.items():
            candidate = trace.program.candidate
            groups[_engine(trace), candidate.zero_stage, candidate.precision].append(text)
        share = min(MOST_RUNS, -(-len(missing) // (2 * len(os.sched_getaffinity(0)))) or 1)
        jobs = [
            self._job([missing[p] for p in part], part)
            for paths in groups.values()
            for part in _parts(sorted(paths, key=lambda p: missing[p].micro_batch), share)
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        done, total = 0, len(missing)
        on_progress(0, total)

        def finished(index: int) -> None:
            nonlocal done
            done += len(jobs[index].runs)
            on_progress(done, total)

        if self._tracer is not None:
            self._tracer.run(jobs, finished)
        return total

    def tape(self, program: Program) -> Tape:
        """The program's tape.

        Raises:
            Untraceable: there is none.
            InfraError: the tracing process does not start, or dies.
        """
        self.trace(self.needed(program))
        depths = self._depths(program)
        if depths:
            shallow, deeper = (self._at(program, depth) for depth in depths)
            if deeper.facts.get("cut") or shallow.facts.get("cut"):
                return deeper  # too much with a part of the blocks
            period = depths[1] - depths[0]
            with contextlib.suppress(NotExtendable):
                return extend(shallow, deeper, (self.blocks - depths[1]) // period, str(deeper.facts["blocks"]))
        return self._at(program, None)

    def _at(self, program: Program, depth: int | None) -> Tape:
        """The program's tape with some depth."""
        wanted = program.candidate.micro_batch
        if wanted > TRACED[-1]:
            if (smaller := self._too_much(Trace(program, wanted, depth))) is not None:
                return smaller
            one, two = (self._load(Trace(program, micro_batch, depth)) for micro_batch in TRACED)
            if two.facts.get("cut"):
                return two
            with contextlib.suppress(NotAffineError):
                return at_micro_batch(one, two, TRACED, wanted)
        return self._load(Trace(program, wanted, depth))

    def _load(self, trace: Trace) -> Tape:
        if (smaller := self._too_much(trace)) is not None:
            return smaller
        path = self._path(trace)
        for _ in range(2):
            if not path.exists():
                self.trace([trace])
            if path in self._crashes:
                raise Untraceable(self._crashes[path])
            if (failure := error_path(str(path))).exists():
                found = json.loads(failure.read_text())
                if found["kind"] != "invalid":  # which may be the trouble of one day
                    self._crashes[path] = found
                    failure.unlink()
                raise Untraceable(found)
            with contextlib.suppress(ValueError, FileNotFoundError):
                return Tape.load(path)
            path.unlink(missing_ok=True)  # cut short, when a disk was full or a machine went down
        raise InfraError(f"no tape could be written to {path.parent}", "see whether that disk is full")

    def _too_much(self, trace: Trace) -> Tape | None:
        """The tape of a smaller micro-batch of the same kind that already needs more than the device has."""
        for micro_batch in range(1, min(trace.micro_batch, TRACED[-1] + 1)):
            path = self._path(dataclasses.replace(trace, micro_batch=micro_batch))
            if path in self._fits or not path.exists():
                continue
            with contextlib.suppress(ValueError):
                tape = Tape.load(path)
                if tape.facts.get("cut"):
                    return tape
                self._fits.add(path)
        return None

    def _depths(self, program: Program) -> list[int]:
        """Two depths from which the model's own can be extended; none where it is traced in full."""
        candidate = program.candidate
        if candidate.zero_stage in (1, 2) or not self.blocks or self._depth_field() is None:
            return []  # partition boundaries cut through the model anywhere
        period = PERIODS[candidate.checkpoint_blocks]
        config = json.loads(program.config)
        least = least_depth(
            self.block_parameters, period, config, parameters=self.parameters, ranks=self._machine.world_size
        )
        first = least + (self.blocks - least) % period
        return [first, first + period] if first + 2 * period < self.blocks else []

    def _depth_field(self) -> str | None:
        model = self._workload.model
        if model.factory:
            return None
        return next((name for name in DEPTH_FIELDS if model.config.get(name) == self.blocks), None)

    def _path(self, trace: Trace) -> Path:
        candidate = trace.program.candidate
        key = self.key(_engine(trace), _variant(candidate), trace.micro_batch)
        return self._folder / f"{key}.npz"

    def _job(self, traces: list[Trace], paths: list[str]) -> Job:
        first = traces[0]
        workload = self._workload
        if first.depth is not None:
            field = self._depth_field()
            model = dataclasses.replace(workload.model, config={**workload.model.config, str(field): first.depth})
            workload = dataclasses.replace(workload, model=model)
        micro_steps = _micro_steps(first.program)
        config = copy.deepcopy(json.loads(first.program.config))
        config.pop("train_batch_size", None)
        config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_steps}
        runs = [
            (trace.program.candidate.replace(micro_batch=trace.micro_batch), path)
            for trace, path in zip(traces, paths, strict=True)
        ]
        return Job(workload, self._machine, config, first.program.rank, micro_steps, runs)


def _micro_steps(program: Program) -> int:
    """Micro-steps of a traced step: one, or a first and a last one; those between are like the first."""
    return min(program.candidate.accumulation, 2)


def _engine(trace: Trace) -> tuple[object, ...]:
    """What must be equal for runs to share an engine."""
    config = json.loads(trace.program.config)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.pop(name, None)
    text = json.dumps(config, sort_keys=True)
    return text, _micro_steps(trace.program), trace.program.rank, trace.depth


def _variant(candidate: Candidate) -> list[object]:
    return [
        candidate.zero_stage,
        candidate.precision,
        candidate.checkpoint_blocks,
        candidate.checkpoint_part,
        candidate.checkpoint_input,
    ]


def _parts(items: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


@cache
def code_digest() -> str:
    """A digest of the code that a trace is made by: ours, and the versions of what it runs."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    beside = [package / "probe" / "torchrun" / f"{name}.py" for name in ("describe", "failure", "meters")]
    for folder in ("probe/virtual", "workload"):
        beside += sorted((package / folder).glob("*.py"))
    for path in beside:
        digest.update(path.read_bytes())
    for name in ("torch", "deepspeed", "transformers"):
        digest.update(f"{name} {metadata.version(name)}".encode())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where tapes and predictions are kept: below XDG_CACHE_HOME, by default ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "autotune" / "virtual"
