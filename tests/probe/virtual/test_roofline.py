"""What a step takes by the plain roofline."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.machine.machine import Machine
from autotune.probe.virtual.roofline import HOST_MEMORY_GB_S, step_seconds
from autotune.probe.virtual.tape import Place
from autotune.workload.phase import Phase

from .script import Script

GB, TERA = 10**9, 10**12
MACHINE = Machine(
    nodes=2,
    devices_per_node=4,
    memory_bandwidth_gb_s=100,
    peak_tflops={"bf16": 10.0, "fp32": 1.0},
    intra_node_gb_s=20,
    inter_node_gb_s=5,
    host_link_gb_s=10,
)


def started() -> Script:
    """A script in the forward phase of the steady step, after a first one that counts for nothing."""
    script = Script()
    script.phase(Phase.FORWARD, first=True)
    script.op(flops=77 * TERA)
    script.phase(Phase.FORWARD)
    return script


def seconds(script: Script, accumulation: int = 1, precision: str = "bf16", machine: Machine = MACHINE) -> float:
    return step_seconds(script.tape(), machine, precision, accumulation)


def micro_step(script: Script, number: int, boundary: int) -> None:
    """Two seconds of forward, four of backward, and at the boundary so many of the optimizer."""
    script.phase(Phase.FORWARD, number)
    script.op(flops=20 * TERA)
    script.phase(Phase.BACKWARD, number)
    script.op(flops=40 * TERA)
    script.phase(Phase.STEP, number)
    script.op(flops=boundary * 10 * TERA)


@pytest.mark.parametrize(("accumulation", "expected"), [(2, 6 + 13), (3, 12 + 13), (64, 63 * 6 + 13)])
def test_accumulation_adds_micro_steps_before_the_boundary(accumulation: int, expected: float) -> None:
    script = Script()
    micro_step(script, 1, boundary=0)
    micro_step(script, 2, boundary=7)
    assert seconds(script, accumulation) == pytest.approx(expected)


def test_without_accumulation_the_step_is_its_one_micro_step() -> None:
    script = Script()
    micro_step(script, 1, boundary=7)
    assert seconds(script) == pytest.approx(13)


def test_loading_initialising_and_the_first_step_count_for_nothing() -> None:
    script = Script()
    for phase in (Phase.LOAD, Phase.INIT):
        script.phase(phase)
        script.op(flops=TERA)
    assert seconds(script) == 0
    micro_step(script, 1, boundary=0)
    assert seconds(script) == pytest.approx(6)


@pytest.mark.parametrize(
    ("flops", "traffic", "precision", "expected"),
    [
        (10 * TERA, GB, "bf16", 1.0),  # bound by arithmetic
        (TERA, 50 * GB, "bf16", 0.5),  # bound by memory
        (10 * TERA, 0, "fp32", 10.0),
        (10 * TERA, 0, "fp16", 10.0),  # no rate of its own
    ],
)
def test_a_kernel_takes_what_arithmetic_or_memory_takes(
    flops: int, traffic: int, precision: str, expected: float
) -> None:
    script = started()
    script.op(flops=flops, traffic=traffic)
    assert seconds(script, precision=precision) == pytest.approx(expected)


def test_what_runs_on_the_host_is_bound_by_its_memory() -> None:
    script = started()
    script.op("deepspeed::adam_update", flops=10**15, traffic=50 * GB, place=Place.HOST)
    assert seconds(script) == pytest.approx(50 / HOST_MEMORY_GB_S)


@pytest.mark.parametrize("to_device", [True, False])
def test_copies_between_host_and_device_are_bound_by_their_link(to_device: bool) -> None:
    script = started()
    script.copy(30 * GB, to_device)
    assert seconds(script) == pytest.approx(3)


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("_allgather_base_", 4, 3 / 4 * 40 / 20),  # within a node
        ("_reduce_scatter_base_", 4, 3 / 4 * 40 / 20),
        ("allreduce_", 4, 2 * 3 / 4 * 40 / 20),
        ("_allgather_base_", 8, 7 / 8 * 40 / 5),  # between nodes
        ("allreduce_", 8, 2 * 7 / 8 * 40 / 5),
        ("broadcast_", 1, 0),  # alone
    ],
)
def test_a_collective_goes_around_its_ring(name: str, ranks: int, expected: float) -> None:
    script = started()
    script.collective(name, ranks, 40 * GB)
    assert seconds(script) == pytest.approx(expected)


def test_streams_run_side_by_side_and_their_work_one_after_the_other() -> None:
    script = started()
    for _ in range(2):
        script.op(flops=20 * TERA)
        script.collective("_allgather_base_", 4, 40 * GB, stream=1)
    assert seconds(script) == pytest.approx(4)
    script.collective("_allgather_base_", 4, 40 * GB, stream=1)
    assert seconds(script) == pytest.approx(4.5)


def test_rates_that_a_machine_does_not_tell_are_never_zero() -> None:
    script = started()
    script.op(flops=TERA, traffic=GB)
    script.copy(GB)
    script.collective("allreduce_", 4, GB)
    unknown = dataclasses.replace(
        MACHINE, memory_bandwidth_gb_s=0, peak_tflops={}, intra_node_gb_s=0, inter_node_gb_s=0, host_link_gb_s=0
    )
    assert 0 < seconds(script, machine=unknown) < float("inf")
