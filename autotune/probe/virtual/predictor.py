"""From a candidate to its prediction: the worst rank, its tape, the replay. Predictions are kept on disk."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import GIB, Machine
from autotune.probe.torchrun.describe import Description
from autotune.probe.virtual.allocator import AllocatorSettings
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.prediction import DeviceOom, Holder, PhaseMemory, Prediction, Verdict
from autotune.probe.virtual.ranks import suspects
from autotune.probe.virtual.replay import Replayed, replay
from autotune.probe.virtual.roofline import step_seconds
from autotune.probe.virtual.tapes import Program, Tapes, Trace
from autotune.space.config import allocator_environment
from autotune.workload.phase import Phase
from autotune.workload.workload import Workload


class Predictor:
    """Predicts candidates of one workload on one machine.

    Args:
        workload, machine: what is trained, and where.
        description: of the model.
        tracer: makes the traces that are missing; without one only what is traced can be predicted.
        folder: of the cache.
    """

    def __init__(
        self, workload: Workload, machine: Machine, description: Description, tracer: Tracer | None, folder: Path
    ) -> None:
        self._machine, self._description = machine, description
        self._asked = {"workload": workload.to_dict(), "machine": machine.to_dict(), "folder": str(folder)}
        self._folder = folder
        self.tapes = Tapes(workload, machine, tracer, description.source, folder / "tapes")
        self.tapes.knows(description.blocks, description.block_parameters, description.parameters or 0)
        self._worst: dict[str, tuple[int, dict[int, int]]] = {}

    def predicted(self, candidate: Candidate, config: str) -> Prediction:
        """The prediction of a candidate with its whole DeepSpeed config, as JSON.

        Raises:
            Untraceable: there is no tape of it.
            InfraError: the tracing process does not start, or dies.
        """
        path = self.path(candidate, config)
        with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or one that was cut short
            return _prediction(json.loads(path.read_text()))
        prediction = self._replayed(candidate, config)
        write(path, prediction.to_dict())
        return prediction

    def path(self, candidate: Candidate, config: str) -> Path:
        """Where the prediction is kept."""
        return self._folder / "predictions" / f"{self.tapes.key('prediction', candidate.to_dict(), config)}.json"

    def program(self, candidate: Candidate, config: str) -> Program:
        """What is to be traced of a candidate: its worst rank."""
        return Program(candidate, config, self._worst_rank(candidate, config)[0])

    def rank_traces(self, candidate: Candidate, config: str) -> list[Trace]:
        """The traces by which the worst rank is found; none where one rank is known to be it."""
        ranks = self._suspects(candidate)
        if len(ranks) == 1:
            return []
        stand_in = _stand_in(candidate)
        return [trace for rank in ranks for trace in self.tapes.needed(Program(stand_in, config, rank))]

    def to_json(self, candidates: list[tuple[Candidate, str]]) -> str:
        """A request, one line, to predict candidates from what is traced; see `answer`."""
        described = {name: getattr(self._description, name) for name in self._description.__slots__}
        wanted = [[candidate.to_dict(), config] for candidate, config in candidates]
        return json.dumps({"predict": self._asked | {"description": described, "candidates": wanted}})

    def _replayed(self, candidate: Candidate, config: str) -> Prediction:
        machine = self._machine
        rank, peaks = self._worst_rank(candidate, config)
        tape = self.tapes.tape(Program(candidate, config, rank))
        settings = AllocatorSettings.parse(allocator_environment(candidate).get("PYTORCH_ALLOC_CONF", ""))
        found = replay(tape, machine, settings)
        host = found.host * machine.devices_per_node
        return Prediction(
            rank=rank,
            phases=found.phases,
            peak_allocated=found.peak_allocated,
            peak_reserved=found.peak_reserved,
            steady_allocated=found.steady_allocated,
            device_total=found.device_total,
            retries=found.retries,
            verdict=self._verdict(found),
            oom=found.oom,
            host_per_node=host,
            host_oom=machine.host_memory_gib > 0 and host > machine.host_memory_gib * GIB,
            holders=found.holders,
            step_s=step_seconds(tape, machine, candidate.precision, candidate.accumulation) if not found.oom else 0.0,
            ranks=peaks | {rank: found.peak_allocated},
        )

    def _verdict(self, found: Replayed) -> Verdict:
        if found.oom or found.device_total > self._machine.device_memory_bytes:
            return Verdict.DOES_NOT_FIT
        comfortable = found.device_total <= self._machine.usable_bytes and not found.retries
        return Verdict.FITS if comfortable else Verdict.AT_RISK

    def _worst_rank(self, candidate: Candidate, config: str) -> tuple[int, dict[int, int]]:
        """(the rank that needs most, rank → peak allocated of those looked at), found with micro-batch 1."""
        ranks = self._suspects(candidate)
        if len(ranks) == 1:
            return ranks[0], {}
        stand_in, text = _stand_in(candidate), _without_batch(config)
        key = f"{stand_in.key} {text}"
        if key not in self._worst:
            peaks = {}
            for rank in ranks:
                found = replay(self.tapes.tape(Program(stand_in, config, rank)), self._machine, AllocatorSettings())
                oom = found.oom
                peaks[rank] = oom.allocated_bytes + oom.requested_bytes if oom else found.peak_allocated
            self._worst[key] = max(ranks, key=lambda rank: peaks[rank]), peaks
        rank, peaks = self._worst[key]
        return rank, peaks if stand_in == candidate else {}

    def _suspects(self, candidate: Candidate) -> list[int]:
        return suspects(self._description.parameter_sizes, self._machine.world_size, candidate.zero_stage)


def write(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(values))
    os.replace(part, path)


def answer(request: dict[str, Any]) -> None:
    """Predict what a request of `Predictor.to_json` asks for, as far as it is traced, into the cache."""
    predictor = Predictor(
        Workload.from_dict(request["workload"]),
        Machine.from_dict(request["machine"]),
        Description(**request["description"]),
        None,
        Path(request["folder"]),
    )
    for values, config in request["candidates"]:
        with contextlib.suppress(LookupError):  # not traced after all, or not traceable: asking for it will tell
            predictor.predicted(Candidate.from_dict(values), config)


def _stand_in(candidate: Candidate) -> Candidate:
    """The candidate with which the worst rank of many is found: one sequence, and blocks recomputed as a whole."""
    plain = candidate.replace(micro_batch=1)
    if candidate.checkpoint_blocks == "none":
        return plain
    return plain.replace(checkpoint_part="whole", checkpoint_input="device")


def _without_batch(config: str) -> str:
    values = json.loads(config)
    accumulates = values.pop("gradient_accumulation_steps", 1) > 1
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        values.pop(name, None)
    return json.dumps([values, accumulates], sort_keys=True)


def _prediction(values: dict[str, Any]) -> Prediction:
    """The prediction that `to_dict` wrote, through JSON."""
    known = dict(values)
    known["phases"] = {name: PhaseMemory(**memory) for name, memory in known["phases"].items()}
    known["verdict"] = Verdict(known["verdict"])
    known["oom"] = DeviceOom(**known["oom"] | {"phase": Phase(known["oom"]["phase"])}) if known["oom"] else None
    known["holders"] = [Holder(**holder) for holder in known["holders"]]
    known["ranks"] = {int(rank): peak for rank, peak in known["ranks"].items()}
    return Prediction(**known)
