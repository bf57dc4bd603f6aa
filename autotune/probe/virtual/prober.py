"""The virtual prober: what DeepSpeed's own code would allocate on devices that are not here."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import InfraError, SettingsError
from autotune.machine.machine import GIB, gib
from autotune.probe.measurement import VIRTUAL, Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.describe import Description
from autotune.probe.torchrun.launcher import Tell
from autotune.probe.virtual.allocator import AllocatorSettings
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.prediction import DeviceOom, Holder, PhaseMemory, Prediction, Verdict
from autotune.probe.virtual.ranks import suspects
from autotune.probe.virtual.replay import Replayed, replay
from autotune.probe.virtual.roofline import step_seconds
from autotune.probe.virtual.tapes import Program, Tapes, Trace, Untraceable, cache_folder, code_digest
from autotune.settings import Settings
from autotune.space.config import allocator_environment, deepspeed_config
from autotune.workload.phase import Phase

PROTOCOL = 1
"""Raised whenever what is predicted changes its meaning."""


class VirtualProber:
    """Predicts candidates for the settings' machine, which need not be here.

    Args:
        settings: of the sweep.
        tell: takes a sentence when something takes its time.
        tracer: makes the traces, its own by default.
    """

    kind = VIRTUAL

    def __init__(self, settings: Settings, tell: Tell = lambda text: None, tracer: Tracer | None = None) -> None:
        self._settings = settings
        self._machine, self._workload = settings.machine, settings.workload
        self._tracer = tracer or Tracer(settings.machine, tell)
        self._folder = cache_folder()
        self._description: Description | None = None
        self._tapes: Tapes | None = None
        self._worst: dict[str, tuple[int, dict[int, int]]] = {}

    @property
    def protocol(self) -> dict[str, Any]:
        """How it is predicted: predictions under different protocols are not the same."""
        return {"version": PROTOCOL}

    @property
    def threads(self) -> int:
        """Of each rank: no rank runs."""
        return 1

    def describe(self) -> Description:
        """What is known of the model before it is probed; looked up once.

        Raises:
            InfraError: the tracing process does not start.
        """
        if self._description is None:
            self._description = self._kept() or self._described()
            self._tapes = Tapes(
                self._workload, self._machine, self._tracer, self._description.source, self._folder / "tapes"
            )
            self._tapes.knows(
                self._description.blocks, self._description.block_parameters, self._description.parameters or 0
            )
        return self._description

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        """See Prober: traces what the candidates need, on all processors."""
        tapes = self._ready()
        unknown = [c for c in candidates if not self._prediction_path(c, self._config(c)).exists()]
        ranked = 0

        def ranking(done: int, of: int) -> None:
            nonlocal ranked
            ranked = of
            on_progress(done, of + len(unknown))

        tapes.trace([trace for c in unknown for trace in self._rank_traces(tapes, c)], ranking)
        rest = []
        for candidate in unknown:
            with contextlib.suppress(Untraceable):  # probing it will tell
                rest += tapes.needed(self._program(candidate, self._config(candidate)))
        tapes.trace(rest, lambda done, of: on_progress(ranked + done, ranked + of))

    def probe(self, request: ProbeRequest) -> Measurement:
        """See Prober."""
        began = time.monotonic()
        candidate = request.candidate
        try:
            prediction = self._predicted(candidate, self._config(candidate))
        except Untraceable as failure:
            return Measurement(
                outcome=Outcome(failure.kind),
                probe_kind=self.kind,
                phase=Phase(failure.phase),
                message=failure.message,
                wall_s=time.monotonic() - began,
                detail=failure.detail,
            )
        return self._measurement(candidate, prediction, time.monotonic() - began)

    def predict(self, candidate: Candidate, config: dict[str, Any] | None = None) -> Prediction:
        """What a candidate needs.

        Args:
            candidate: what to predict.
            config: a whole DeepSpeed config instead of the candidate's own.

        Raises:
            SettingsError: DeepSpeed refuses it, or the model cannot be traced.
            InfraError: the tracing process does not start, or dies.
        """
        self._ready()
        try:
            return self._predicted(candidate, json.dumps(config) if config else self._config(candidate))
        except Untraceable as failure:
            raise SettingsError(
                f"{failure.message} (in {failure.phase})", "nothing is predicted for a program that cannot run"
            ) from failure

    def close(self) -> None:
        """See Prober."""
        self._tracer.close()

    # -- predictions --------------------------------------------------------------------------------------------

    def _predicted(self, candidate: Candidate, config: str) -> Prediction:
        path = self._prediction_path(candidate, config)
        with contextlib.suppress(FileNotFoundError, ValueError):  # none yet, or one that was cut short
            return _prediction(json.loads(path.read_text()))
        prediction = self._replayed(candidate, config)
        _write(path, prediction.to_dict())
        return prediction

    def _replayed(self, candidate: Candidate, config: str) -> Prediction:
        tapes, machine = self._ready(), self._machine
        rank, peaks = self._worst_rank(tapes, candidate, config)
        tape = tapes.tape(Program(candidate, config, rank))
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
        return (
            Verdict.FITS if found.device_total <= self._machine.usable_bytes and not found.retries else Verdict.AT_RISK
        )

    def _worst_rank(self, tapes: Tapes, candidate: Candidate, config: str) -> tuple[int, dict[int, int]]:
        """(the rank that needs most, rank → peak allocated of those looked at), found with micro-batch 1."""
        ranks = self._suspects(candidate)
        if len(ranks) == 1:
            return ranks[0], {}
        stand_in, text = _stand_in(candidate), _without_batch(config)
        key = f"{stand_in.key} {text}"
        if key not in self._worst:
            peaks = {}
            for rank in ranks:
                found = replay(tapes.tape(Program(stand_in, config, rank)), self._machine, AllocatorSettings())
                peaks[rank] = (
                    found.oom.allocated_bytes + found.oom.requested_bytes if found.oom else found.peak_allocated
                )
            self._worst[key] = max(ranks, key=lambda rank: peaks[rank]), peaks
        rank, peaks = self._worst[key]
        return rank, peaks if stand_in == candidate else {}

    def _rank_traces(self, tapes: Tapes, candidate: Candidate) -> list[Trace]:
        ranks, config = self._suspects(candidate), self._config(candidate)
        if len(ranks) == 1:
            return []
        stand_in = _stand_in(candidate)
        return [trace for rank in ranks for trace in tapes.needed(Program(stand_in, config, rank))]

    def _suspects(self, candidate: Candidate) -> list[int]:
        sizes = self.describe().parameter_sizes
        return suspects(sizes, self._machine.world_size, candidate.zero_stage)

    def _program(self, candidate: Candidate, config: str) -> Program:
        return Program(candidate, config, self._worst_rank(self._ready(), candidate, config)[0])

    def _config(self, candidate: Candidate) -> str:
        nvme = self._settings.space.nvme_path
        return json.dumps(deepspeed_config(candidate, self._workload, self._machine, nvme))

    def _ready(self) -> Tapes:
        self.describe()
        assert self._tapes is not None
        return self._tapes

    def _prediction_path(self, candidate: Candidate, config: str) -> Path:
        return self._folder / "predictions" / f"{self._ready().key('prediction', candidate.to_dict(), config)}.json"

    def _measurement(self, candidate: Candidate, prediction: Prediction, wall_s: float) -> Measurement:
        outcome, message = Outcome.OK, None
        speed: dict[str, Any] = {}
        phase: Phase | None = None
        needed: int | None = None
        oom = prediction.oom
        if oom is not None:
            outcome, phase = Outcome.OOM_DEVICE, oom.phase
            needed = oom.allocated_bytes + oom.requested_bytes
            where = f" in {oom.module}" if oom.module else ""
            message = f"{gib(oom.requested_bytes)} more{where} do not fit: {gib(oom.reserved_bytes)} are reserved"
        elif prediction.host_oom:
            outcome, phase, needed = Outcome.OOM_HOST, Phase.INIT, prediction.host_per_node
            has = self._machine.host_memory_gib
            message = f"a node's ranks hold {gib(needed)} of host memory, and a node has {has:g} GiB"
        else:
            sequences = candidate.micro_batch * candidate.accumulation * self._machine.world_size
            rate = sequences * self._workload.seq_len / prediction.step_s
            speed = dict.fromkeys(("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"), rate)
            speed["step_s"] = prediction.step_s
        return Measurement(
            outcome=outcome,
            probe_kind=self.kind,
            phase=phase,
            message=message,
            peak_allocated_bytes=prediction.peak_allocated,
            peak_reserved_bytes=prediction.peak_reserved,
            device_total_bytes=prediction.device_total,
            worst_rank=prediction.rank,
            needed_bytes=needed,
            host_peak_bytes=prediction.host_per_node,
            memory={name: [dataclasses.asdict(memory)] for name, memory in prediction.phases.items()},
            wall_s=wall_s,
            environment=allocator_environment(candidate),
            detail={"prediction": prediction.to_dict()},
            **speed,
        )

    # -- the model ----------------------------------------------------------------------------------------------

    def _kept(self) -> Description | None:
        """What an earlier process has seen of the model; nothing tells whether a custom one is still the same."""
        if self._workload.model.factory:
            return None
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            return Description(**json.loads(self._description_path.read_text()))
        return None

    @property
    def _description_path(self) -> Path:
        text = json.dumps([self._workload.to_dict(), code_digest()], sort_keys=True)
        return self._folder / "descriptions" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _described(self) -> Description:
        asked = {"workload": self._workload.to_dict(), "working_directory": os.getcwd()}
        with tempfile.TemporaryDirectory(prefix="autotune-describe-") as name:
            folder = Path(name)
            (folder / "workload.json").write_text(json.dumps(asked))
            self._tracer.describe(folder)
            path = folder / "description.json"
            if not path.exists():
                raise InfraError("the model could not be looked at", "the same command tries again")
            values = json.loads(path.read_text())
        if values["error"] is None:
            _write(self._description_path, values)
        return Description(**values)


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


def _write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(values))
    os.replace(part, path)


def _prediction(values: dict[str, Any]) -> Prediction:
    """The prediction that `to_dict` wrote, through JSON."""
    known = dict(values)
    known["phases"] = {name: PhaseMemory(**memory) for name, memory in known["phases"].items()}
    known["verdict"] = Verdict(known["verdict"])
    known["oom"] = DeviceOom(**known["oom"] | {"phase": Phase(known["oom"]["phase"])}) if known["oom"] else None
    known["holders"] = [Holder(**holder) for holder in known["holders"]]
    known["ranks"] = {int(rank): peak for rank, peak in known["ranks"].items()}
    return Prediction(**known)
