"""A stand-in for the virtual prober: predictions by a formula, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.machine.machine import GIB
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.describe import Description
from autotune.probe.virtual.prediction import DeviceOom, Holder, PhaseMemory, Prediction, Verdict
from autotune.settings import Settings
from autotune.workload.phase import Phase

PARAMETERS = 20_554_567_680


class Oracle:
    """Has the shape of VirtualProber. A micro-batch takes 4 GiB, a stage below 3 leaves it no room."""

    kind = "virtual"
    threads = 1
    made: list[Oracle] = []  # noqa: RUF012 - what tests look at

    def __init__(self, settings: Settings, tell: Callable[[str], None] = lambda text: None) -> None:
        self.settings, self.machine, self.tell = settings, settings.machine, tell
        self.prepared: list[Candidate] = []
        self.probed: list[Candidate] = []
        self.asked: list[tuple[Candidate, dict[str, Any] | None]] = []
        self.closed = False
        Oracle.made.append(self)

    @property
    def protocol(self) -> dict[str, Any]:
        return {"version": 1}

    def describe(self) -> Description:
        return Description(parameters=PARAMETERS, parameter_sizes=[50432 * 6144])

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        self.prepared = list(candidates)
        for done in range(4):
            on_progress(done + 1, 4)

    def probe(self, request: ProbeRequest) -> Measurement:
        candidate = request.candidate
        self.probed.append(candidate)
        prediction = self.predict(candidate)
        found: dict[str, Any] = {
            "probe_kind": self.kind,
            "peak_allocated_bytes": prediction.peak_allocated,
            "peak_reserved_bytes": prediction.peak_reserved,
            "device_total_bytes": prediction.device_total,
            "host_peak_bytes": prediction.host_per_node,
            "worst_rank": prediction.rank,
            "environment": {"threads": 1, "torch": "2.13.0", "PYTORCH_ALLOC_CONF": "here"},
            "detail": {"prediction": prediction.to_dict()},
            "wall_s": 0.01,
        }
        if prediction.oom:
            needed = prediction.device_total
            return Measurement(Outcome.OOM_DEVICE, phase=prediction.oom.phase, needed_bytes=needed, **found)
        sequences = candidate.micro_batch * candidate.accumulation * self.machine.world_size
        rate = sequences * self.settings.workload.seq_len / prediction.step_s
        speed = dict.fromkeys(("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"), rate)
        return Measurement(Outcome.OK, step_s=prediction.step_s, **speed, **found)

    def predict(self, candidate: Candidate, config: dict[str, Any] | None = None) -> Prediction:
        self.asked.append((candidate, config))
        if candidate.micro_batch == 7:
            raise SettingsError("aten::nonzero in layers.3 cannot be traced", "its size depends on data")
        total = (10 if candidate.zero_stage == 3 else 40) * GIB + candidate.micro_batch * 4 * GIB
        machine = self.machine
        fits = total <= machine.device_memory_bytes
        verdict = Verdict.FITS if total <= machine.usable_bytes else Verdict.AT_RISK if fits else Verdict.DOES_NOT_FIT
        memory = PhaseMemory(total - 2 * GIB, total - 3 * GIB, total - GIB, total, 12 * GIB, 3 * GIB)
        return Prediction(
            rank=5,
            phases=dict.fromkeys(("load", "init", "first_step", "forward", "backward", "step"), memory),
            peak_allocated=total - 2 * GIB,
            peak_reserved=total - GIB,
            steady_allocated=total - 3 * GIB,
            device_total=total,
            retries=0,
            verdict=verdict,
            oom=None if fits else DeviceOom(Phase.BACKWARD, "layers.7.mlp", 2 * GIB, total - 4 * GIB, total - 3 * GIB),
            host_per_node=96 * GIB,
            host_oom=machine.host_memory_gib < 96,
            holders=[
                Holder("activations", "gpt_neox.layers.*.mlp", total // 2, 44),
                Holder("parameters", "", total // 4, 532),
                Holder("allocator slack", "", total // 8),
            ],
            step_s=40.0 / candidate.micro_batch + candidate.zero_stage,
        )

    def close(self) -> None:
        self.closed = True
