"""What each outcome becomes in Optuna."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from autotune.candidate import Candidate
from autotune.machine.machine import GIB, Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.search.outcomes import FAILED, LEAST_OOM, fits, slowest, told, violation
from autotune.workload.workload import Model, Workload

MACHINE = Machine("m", device_memory_gib=100.0, headroom=0.05, host_memory_gib=200.0)
WORST = 3.0

byte_counts = st.none() | st.integers(0, 10**13)
measurements = st.builds(
    Measurement,
    outcome=st.sampled_from(Outcome),
    probe_kind=st.just("table"),
    tokens_per_s=st.none() | st.floats(1e-3, 1e9),
    peak_reserved_bytes=byte_counts,
    device_total_bytes=byte_counts,
    needed_bytes=byte_counts,
)


@given(measurement=measurements, inferred=st.booleans())
def test_every_measurement_becomes_something_that_optuna_takes(measurement: Measurement, inferred: bool) -> None:
    became = told(measurement, MACHINE, WORST, inferred=inferred)
    outcome = measurement.outcome
    if outcome is Outcome.INFRA:
        assert (became.state, became.value, became.constraint) == (TrialState.FAIL, None, None)
        return
    assert became.state in (TrialState.COMPLETE, TrialState.PRUNED)
    assert became.constraint is not None
    assert math.isfinite(became.constraint)
    if became.state is TrialState.COMPLETE:
        assert became.value is not None
        assert math.isfinite(became.value)
    if not outcome.measured_memory:
        assert became.constraint >= LEAST_OOM


@given(measurement=measurements)
def test_feasible_means_that_it_ran_and_that_optuna_agrees(measurement: Measurement) -> None:
    became = told(measurement, MACHINE, WORST)
    feasible = became.state is TrialState.COMPLETE and became.constraint is not None and became.constraint <= 0
    assert fits(measurement, MACHINE) == feasible


@pytest.mark.parametrize(
    ("outcome", "state", "value", "constraint"),
    [
        (Outcome.OK, TrialState.COMPLETE, math.log(500), 60 / 95 - 1),
        (Outcome.STOPPED, TrialState.PRUNED, math.log(500), 60 / 95 - 1),
        (Outcome.OOM_DEVICE, TrialState.COMPLETE, WORST, 120 / 95 - 1),
        (Outcome.OOM_HOST, TrialState.COMPLETE, WORST, LEAST_OOM),
        (Outcome.INVALID, TrialState.COMPLETE, WORST, FAILED),
        (Outcome.DIVERGED, TrialState.COMPLETE, WORST, FAILED),
        (Outcome.TIMEOUT, TrialState.COMPLETE, WORST, FAILED),
        (Outcome.CRASHED, TrialState.COMPLETE, WORST, FAILED),
        (Outcome.INFRA, TrialState.FAIL, None, None),
    ],
)
def test_the_table_of_the_design(
    outcome: Outcome, state: TrialState, value: float | None, constraint: float | None
) -> None:
    measurement = Measurement(
        outcome, "table", tokens_per_s=500.0, peak_reserved_bytes=60 * GIB, needed_bytes=120 * GIB
    )
    became = told(measurement, MACHINE, WORST)
    assert became.state is state
    assert became.value == value
    assert became.constraint == pytest.approx(constraint)


def test_an_inferred_oom_is_pruned_with_the_violation_of_its_source() -> None:
    oom = Measurement(Outcome.OOM_DEVICE, "table", needed_bytes=120 * GIB)
    became = told(oom, MACHINE, WORST, inferred=True)
    assert (became.state, became.value) == (TrialState.PRUNED, None)
    assert became.constraint == violation(oom, MACHINE)


def test_an_oom_is_never_told_as_a_near_miss() -> None:
    early = Measurement(Outcome.OOM_DEVICE, "table", needed_bytes=10 * GIB)  # a lower bound, from an early phase
    assert violation(early, MACHINE) == LEAST_OOM
    assert violation(Measurement(Outcome.OOM_DEVICE, "table"), MACHINE) == LEAST_OOM


def test_memory_inside_the_headroom_is_not_feasible_but_is_told_with_its_speed() -> None:
    tight = Measurement(Outcome.OK, "table", tokens_per_s=500.0, peak_reserved_bytes=97 * GIB)
    assert not fits(tight, MACHINE)
    assert told(tight, MACHINE, WORST).value == math.log(500)
    assert violation(tight, MACHINE) > 0


def test_the_stand_in_for_a_worst_value_is_below_whatever_a_probe_can_measure() -> None:
    workload = Workload(Model("m", type="gpt2"), seq_len=1000)
    candidate = Candidate(micro_batch=2, accumulation=3, zero_stage=1, precision="bf16")
    machine = Machine("m", nodes=1, devices_per_node=2)
    assert slowest(candidate, workload, machine, deadline_s=120.0) == pytest.approx(math.log(12_000 / 120))
