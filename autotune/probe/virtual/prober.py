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
from autotune.machine.machine import gib
from autotune.probe.measurement import VIRTUAL, Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.describe import Description
from autotune.probe.torchrun.launcher import Tell
from autotune.probe.virtual.client import Tracer
from autotune.probe.virtual.prediction import Prediction
from autotune.probe.virtual.predictor import Predictor, write
from autotune.probe.virtual.tapes import Trace, Untraceable, cache_folder, code_digest
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
        self._predictor: Predictor | None = None

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
            self._predictor = Predictor(self._workload, self._machine, self._description, self._tracer, self._folder)
        return self._description

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        """See Prober: traces what the candidates need and predicts them, on all processors.

        Small micro-batches come first: where one does not fit, the larger ones of its kind need not be traced.
        """
        predictor = self._ready()
        unknown = [(c, text) for c in candidates if not predictor.path(c, text := self._config(c)).exists()]
        done = 0

        def progress(more: int, of: int) -> None:
            on_progress(done + more, max(done + of + len(unknown), 1))

        def trace(traces: list[Trace]) -> None:
            nonlocal done
            done += predictor.tapes.trace(traces, progress)

        trace([t for candidate, config in unknown for t in predictor.rank_traces(candidate, config)])
        programs = []
        for candidate, config in unknown:
            with contextlib.suppress(Untraceable):  # probing it will tell
                programs.append(predictor.program(candidate, config))
        for micro_batch in sorted({t.micro_batch for p in programs for t in predictor.tapes.needed(p)}):
            trace([t for p in programs for t in predictor.tapes.needed(p) if t.micro_batch == micro_batch])
        share = max(1, len(unknown) // (4 * len(os.sched_getaffinity(0))))
        parts = [unknown[start : start + share] for start in range(0, len(unknown), share)]
        self._tracer.predict([predictor.to_json(part) for part in parts])
        on_progress(done + len(unknown), max(done + len(unknown), 1))

    def probe(self, request: ProbeRequest) -> Measurement:
        """See Prober."""
        began = time.monotonic()
        candidate = request.candidate
        try:
            prediction = self._ready().predicted(candidate, self._config(candidate))
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
        predictor = self._ready()
        try:
            return predictor.predicted(candidate, json.dumps(config) if config else self._config(candidate))
        except Untraceable as failure:
            raise SettingsError(
                f"{failure.message} (in {failure.phase})", "nothing is predicted for a program that cannot run"
            ) from failure

    def close(self) -> None:
        """See Prober."""
        self._tracer.close()

    # -- predictions --------------------------------------------------------------------------------------------

    def _config(self, candidate: Candidate) -> str:
        nvme = self._settings.space.nvme_path
        return json.dumps(deepspeed_config(candidate, self._workload, self._machine, nvme))

    def _ready(self) -> Predictor:
        self.describe()
        assert self._predictor is not None
        return self._predictor

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
            write(self._description_path, values)
        return Description(**values)
