"""Predicts a dozen candidates of a 1 B model, measures them on the GPU here, and says where the two differ."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from autotune.candidate import Candidate
from autotune.errors import AutotuneError
from autotune.machine.detect import visible_gpus
from autotune.machine.machine import gib
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.probe.virtual.prober import VirtualProber
from autotune.settings import Settings, compose_settings
from autotune.space.space import Space
from tests.gpu import device
from tests.gpu.comparison import Check, Pair, Report

LIMIT_S = 390.0
"""No probe starts later, so that the whole takes less than eight minutes; seconds."""
LAUNCH_S = 5.0
"""Starting and ending a probe's ranks may take so long where the launcher is warm, beside what they do; seconds."""
SAME = 0.001
"""The same candidate, measured twice, allocates the same to this share."""
REPORT = Path("studies/gpu-check.json")
MODEL = """
    model=llama2_7b model.name=llama_1b model.config.num_hidden_layers=22 model.config.hidden_size=2048
    model.config.intermediate_size=5632 model.config.num_key_value_heads=4 model.config.max_position_embeddings=2048
    workload.seq_len=2048 workload.global_batch=null
    probe.warmup_steps=1 probe.steps=2 probe.deadline_s=90
"""


@dataclass(frozen=True)
class Plan:
    """What is looked at on one machine.

    Attributes:
        settings: model, machine, steps of a probe.
        candidates: to compare, the most telling first.
        too_large: one that no such device can hold.
    """

    settings: Settings
    candidates: Sequence[Candidate]
    too_large: Candidate

    @property
    def world(self) -> int:
        """Ranks."""
        return self.settings.machine.world_size


@dataclass(frozen=True)
class Case:
    """The knobs of a candidate that matter here."""

    zero_stage: int
    checkpoint_blocks: str
    micro_batch: int
    accumulation: int
    offload_optimizer: str | None = None
    overlap_comm: bool | None = None

    def candidate(self, space: Space) -> Candidate:
        """The candidate, its other knobs as the space has them."""
        knobs = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found = space.canonical(knobs)
        assert found is not None, knobs
        return found


CASES = (
    Case(1, "none", 2, 1),
    Case(3, "all", 4, 2),
    Case(0, "none", 1, 1),
    Case(2, "half", 2, 2, overlap_comm=True),
    Case(3, "none", 2, 1),
    Case(1, "all", 4, 1, offload_optimizer="cpu"),
    Case(2, "all", 4, 2),
    Case(0, "all", 4, 2),
    Case(3, "half", 1, 2),
    Case(2, "none", 1, 2, offload_optimizer="cpu"),
    Case(3, "all", 2, 1, offload_optimizer="cpu"),
    Case(1, "half", 4, 2),
)
TOO_LARGE = Case(0, "none", 1024, 1)
SEVERAL = 5
"""With more than one rank, so many of the cases."""


def main(arguments: Sequence[str]) -> int:
    """Check the GPU here and write the report; the exit code is 0 where all is well, 1 where not, 2 without CUDA."""
    try:
        if reason := device.missing():
            print(reason)
            return 2
        plans = [plan(1, CASES)] + ([plan(2, CASES[:SEVERAL])] if len(visible_gpus()) > 1 else [])
    except AutotuneError as error:
        print(f"{error.message}; {error.hint}")
        return 2
    return run(plans, device.used_bytes, Path(arguments[0]) if arguments else REPORT)


def plan(devices: int, cases: Sequence[Case]) -> Plan:
    """The plan for so many of the devices here."""
    settings = compose_settings([*MODEL.split(), "machine=auto", f"machine.devices_per_node={devices}"])
    space = Space(settings)
    return Plan(settings, [case.candidate(space) for case in cases], TOO_LARGE.candidate(space))


def run(plans: Sequence[Plan], used: Callable[[], int], path: Path) -> int:
    """Carry plans out, print the report and write it; 0 where everything is as predicted, else 1.

    Args:
        plans: what to do, in this order, as long as there is time.
        used: says how many bytes of the devices are in use.
        path: of the report.
    """
    began = time.monotonic()
    report = Report(about=_about(plans[0].settings))
    for each in plans:
        try:
            _carry_out(each, used, began + LIMIT_S, report)
        except AutotuneError as error:
            report.checks.append(Check(False, f"{error.message}; {error.hint}"))
    report.about["seconds"] = round(time.monotonic() - began, 1)
    report.print(sys.stdout)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_dict(), indent=1))
    print(f"{report.about['seconds']} s; {path}")
    return 0 if report.good else 1


def _carry_out(plan: Plan, used: Callable[[], int], deadline: float, report: Report) -> None:
    before = used()
    predicted = predict(plan.settings, [*plan.candidates, plan.too_large])
    with _measuring(plan.settings) as measure:
        for candidate in plan.candidates:
            if time.monotonic() > deadline:
                report.left_out.append(f"{plan.world} ranks  {candidate}")
                continue
            pair = Pair(plan.world, candidate, predicted[candidate], measure(candidate))
            report.pairs.append(pair)
        _check_oom(plan, predicted[plan.too_large], measure, report)
        measured = [pair.measured for pair in report.pairs if pair.world == plan.world]
        report.checks.append(launching(measured))
        left = device.left_over(used, before)
        sentence = f"with the launcher still warm, {gib(max(left, 0))} more are in use than before it started"
        report.checks.append(Check(left <= device.SLACK, sentence))


def predict(settings: Settings, candidates: Sequence[Candidate]) -> dict[Candidate, Measurement]:
    """Candidate → what is predicted. Nothing of the prober is left when it returns."""
    began = time.monotonic()
    prober = VirtualProber(settings, _tell)
    try:
        prober.prepare(candidates, lambda done, of: None)
        found = {candidate: prober.probe(ProbeRequest(candidate, settings.probe.steps)) for candidate in candidates}
    finally:
        prober.close()
    _tell(f"{len(candidates)} candidates predicted in {time.monotonic() - began:.1f} s")
    return found


@contextmanager
def _measuring(settings: Settings) -> Iterator[Callable[[Candidate], Measurement]]:
    """Measures one candidate after the other with one warm launcher."""
    prober = TorchrunProber(settings, make_launcher(settings, _tell))
    began = time.monotonic()

    def measure(candidate: Candidate) -> Measurement:
        measured = prober.probe(ProbeRequest(candidate, settings.probe.steps, confirmation=True))
        _tell(f"{candidate}: {measured.outcome} after {measured.wall_s:.1f} s {measured.message or ''}")
        return measured

    try:
        prober.describe()
        _tell(f"the launcher is warm after {time.monotonic() - began:.1f} s")
        yield measure
    finally:
        prober.close()


def _check_oom(plan: Plan, predicted: Measurement, measure: Callable[[Candidate], Measurement], report: Report) -> None:
    """What is far too large ends as out of memory, and what fits runs after it as it did before."""
    pair = Pair(plan.world, plan.too_large, predicted, measure(plan.too_large))
    report.pairs.append(pair)
    found = pair.measured.outcome
    report.checks.append(Check(found is Outcome.OOM_DEVICE, f"what is far too large ends as {found}"))
    earlier = next((p for p in report.pairs if p.world == plan.world and p.measured.outcome is Outcome.OK), None)
    if earlier is None:
        return
    again = measure(earlier.candidate)
    peaks = [m.peak_allocated_bytes or 0 for m in (earlier.measured, again)]
    same = again.outcome is Outcome.OK and abs(peaks[1] - peaks[0]) <= SAME * peaks[0]
    sentence = f"the probe after it ends as {again.outcome} with {gib(peaks[1])} allocated, {gib(peaks[0])} before it"
    report.checks.append(Check(same, sentence))


def launching(measured: Sequence[Measurement]) -> Check:
    """What the launcher costs from the second probe on, beside what the ranks do."""
    fine = [m for m in measured[1:] if m.outcome is Outcome.OK]
    costs = [(m.overhead_s or 0.0) - m.detail["timeline_s"]["initialised"] for m in fine]
    if not costs:
        return Check(False, "no second probe went well, so that nothing is known of the warm launcher")
    median, whole = statistics.median(costs), statistics.median(m.overhead_s or 0.0 for m in fine)
    return Check(
        median <= LAUNCH_S,
        f"from the second probe on, starting and ending ranks takes {median:.2f} s (at most {max(costs):.2f}); "
        f"with building the model and initialising DeepSpeed {whole:.2f} s",
    )


def _about(settings: Settings) -> dict[str, object]:
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    return {
        "machine": settings.machine.to_dict(),
        "workload": settings.workload.to_dict(),
        "versions": versions,
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
