"""An OOM is inferred only where it must be one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement, Outcome
from autotune.search.frontier import Frontier, implies, inferred
from autotune.store.records import ProbeRecord
from autotune.workload.phase import Phase

candidates = st.builds(
    Candidate,
    micro_batch=st.sampled_from([1, 2, 4, 8]),
    accumulation=st.sampled_from([1, 2, 4, 8]),
    zero_stage=st.integers(0, 3),
    precision=st.just("bf16"),
    offload_optimizer=st.sampled_from([None, "cpu"]),
    checkpoint_blocks=st.sampled_from(["none", "half"]),
    reduce_bucket_size=st.sampled_from([None, 10**8]),
)


def record(candidate: Candidate, outcome: Outcome = Outcome.OOM_DEVICE, **marks: Any) -> ProbeRecord:
    values: dict[str, Any] = {
        "study": "s",
        "trial": 7,
        "key": candidate.key,
        "candidate": candidate,
        "measurement": Measurement(outcome, "table", phase=Phase.BACKWARD, needed_bytes=99),
        "inferred": False,
        "reused": False,
        "confirmation": False,
        "optuna_study": None,
        "optuna_number": None,
        "created": "",
    }
    return ProbeRecord(**(values | marks))


@given(
    oom=candidates,
    micro_batch=st.sampled_from([1, 2, 4, 8]),
    accumulation=st.sampled_from([1, 2, 4, 8]),
    zero_stage=st.none() | st.integers(0, 3),
)
def test_only_towards_larger_micro_batches_with_every_other_knob_equal(
    oom: Candidate, micro_batch: int, accumulation: int, zero_stage: int | None
) -> None:
    stage = oom.zero_stage if zero_stage is None else zero_stage
    other = oom.replace(micro_batch=micro_batch, accumulation=accumulation, zero_stage=stage)
    if implies(oom, other):
        assert other.micro_batch > oom.micro_batch
        assert set(oom.differences(other)) <= {"micro_batch", "accumulation"}
        assert oom.accumulation == 1 or other.accumulation > 1
        if other.accumulation != oom.accumulation:
            assert oom.micro_batch * oom.accumulation == other.micro_batch * other.accumulation
    elif other.micro_batch > oom.micro_batch and stage == oom.zero_stage:
        assert other.accumulation != oom.accumulation


@given(oom=candidates, knob=st.sampled_from(["zero_stage", "offload_optimizer", "checkpoint_blocks"]))
def test_no_other_knob_is_reasoned_along(oom: Candidate, knob: str) -> None:
    other = oom.replace(micro_batch=oom.micro_batch * 2, **{knob: "different"})
    assert not implies(oom, other)


@pytest.mark.parametrize(
    ("oom", "other", "holds"),
    [
        ((2, 4), (4, 4), True),  # accumulation free and equal
        ((2, 4), (4, 2), True),  # global batch fixed
        ((2, 4), (8, 1), False),  # ZeRO-2 keeps no averaged gradients there
        ((2, 1), (4, 1), True),
        ((4, 2), (2, 4), False),  # towards smaller
        ((2, 4), (4, 8), False),  # neither equal accumulation nor equal batch
        ((2, 4), (2, 4), False),
    ],
)
def test_what_happens_to_accumulation(oom: tuple[int, int], other: tuple[int, int], holds: bool) -> None:
    base = Candidate(micro_batch=1, accumulation=1, zero_stage=2, precision="bf16")
    one, two = (base.replace(micro_batch=micro, accumulation=steps) for micro, steps in (oom, other))
    assert implies(one, two) == holds


@given(seen=st.lists(candidates, max_size=6), asked=candidates)
def test_the_frontier_finds_exactly_what_the_rule_says(seen: list[Candidate], asked: Candidate) -> None:
    frontier = Frontier()
    for candidate in seen:
        frontier.add(record(candidate))
    source = frontier.source(asked)
    assert (source is not None) == any(implies(candidate, asked) for candidate in seen)
    assert source is None or implies(source.candidate, asked)


def test_nothing_is_inferred_from_what_was_inferred_or_ran() -> None:
    small = Candidate(micro_batch=1, accumulation=4, zero_stage=1, precision="bf16")
    frontier = Frontier()
    frontier.add(record(small, inferred=True))
    frontier.add(record(small, Outcome.OK))
    frontier.add(record(small, Outcome.CRASHED))
    assert frontier.source(small.replace(micro_batch=2)) is None


def test_an_inferred_measurement_says_where_it_comes_from() -> None:
    source = record(Candidate(micro_batch=2, accumulation=4, zero_stage=1, precision="bf16"), Outcome.OOM_HOST)
    measurement = inferred(source)
    assert (measurement.outcome, measurement.phase, measurement.needed_bytes) == (Outcome.OOM_HOST, Phase.BACKWARD, 99)
    assert measurement.message == "micro-batch 2 is already out of memory (trial 7)"
    assert dataclasses.replace(measurement, message=None).wall_s == 0.0
