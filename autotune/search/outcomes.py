"""What an outcome becomes in Optuna: a state, a value and the one constraint `memory` (feasible at or below 0).

    ok                                    COMPLETE  log tokens/s          use ÷ usable memory − 1
    oom_device, oom_host                  COMPLETE  worst feasible so far max(estimate, 0.05)
    invalid, diverged, timeout, crashed   COMPLETE  worst feasible so far 1.0
    inferred OOM                          PRUNED    –                     that of the trial it is inferred from
    stopped                               PRUNED    its upper bound       measured
    infra                                 FAIL      –                     –

FAIL is invisible to samplers, so whatever says something about a candidate is told as finished; every finished trial
has the constraint, because a trial without one counts as feasible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optuna.trial import TrialState

from autotune.candidate import Candidate
from autotune.machine.machine import GIB, Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.settings import Settings
from autotune.store.records import ProbeRecord
from autotune.workload.workload import Workload

CONSTRAINT = "memory"
LEAST_OOM = 0.05
"""The least violation of an OOM whose need is not known: as far beyond as the default headroom is below."""

FAILED = 1.0
"""The violation of a candidate that does not run: as if it needed twice the memory."""


@dataclass(frozen=True, slots=True)
class Told:
    """What Optuna is told of a trial. The value of a pruned trial is reported as its only intermediate value."""

    state: TrialState
    value: float | None
    constraint: float | None


def told(measurement: Measurement, machine: Machine, worst: float, *, inferred: bool = False) -> Told:
    """What a measurement becomes in Optuna.

    Args:
        measurement: how the probe ended.
        machine: whose memory, less headroom, is the limit.
        worst: the value of a candidate that did not run: log tokens/s of the worst feasible one so far.
        inferred: the measurement is an OOM taken from a smaller micro-batch.
    """
    outcome = measurement.outcome
    if outcome is Outcome.INFRA:
        return Told(TrialState.FAIL, None, None)
    constraint = violation(measurement, machine)
    if inferred:
        return Told(TrialState.PRUNED, None, constraint)
    if outcome.measured_memory and measurement.tokens_per_s:
        value = math.log(measurement.tokens_per_s)
        return Told(TrialState.COMPLETE if outcome is Outcome.OK else TrialState.PRUNED, value, constraint)
    return Told(TrialState.PRUNED if outcome is Outcome.STOPPED else TrialState.COMPLETE, worst, constraint)


def of_record(record: ProbeRecord, settings: Settings, worst: float | None) -> Told:
    """What a stored probe becomes in Optuna; `worst` is None where nothing feasible is known yet."""
    if worst is None:
        worst = slowest(record.candidate, settings.workload, settings.machine, settings.probe.deadline_s)
    return told(record.measurement, settings.machine, worst, inferred=record.inferred)


def violation(measurement: Measurement, machine: Machine) -> float:
    """By how much a measurement breaks the memory limit, as a share of it; at or below 0 it fits."""
    outcome = measurement.outcome
    if outcome.measured_memory:
        return (measurement.used_bytes or 0) / machine.usable_bytes - 1
    if outcome.is_oom:
        limit = machine.usable_bytes if outcome is Outcome.OOM_DEVICE else machine.host_memory_gib * GIB
        known = measurement.needed_bytes is not None and limit > 0
        return max((measurement.needed_bytes or 0) / limit - 1, LEAST_OOM) if known else LEAST_OOM
    return FAILED


def fits(measurement: Measurement, machine: Machine) -> bool:
    """Whether a measurement is that of a feasible candidate: it ran and leaves the headroom free."""
    return measurement.outcome is Outcome.OK and (measurement.used_bytes or 0) <= machine.usable_bytes


def slowest(candidate: Candidate, workload: Workload, machine: Machine, deadline_s: float) -> float:
    """Log tokens/s of a probe whose single step takes the whole deadline: below anything that is ever measured.

    It stands in for the worst feasible value while there is none, on the scale that real values will have.
    """
    sequences = candidate.micro_batch * candidate.accumulation * machine.world_size
    return math.log(sequences * workload.seq_len / deadline_s)
