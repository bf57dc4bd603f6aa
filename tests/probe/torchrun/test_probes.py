"""Real probes: gpt_tiny on two ranks under DeepSpeed, measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autotune.machine.machine import GIB
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.probe.torchrun.spec import RankResult
from autotune.workload.phase import Phase

from .conftest import CHECKPOINTED, PLAIN, STAGES, Probe, replace, settings

pytestmark = pytest.mark.probes

PARAMETERS = 2_238_464
OFFLOADED = {"offload_optimizer": "cpu"}
VARIANTS: list[dict[str, Any]] = [
    *STAGES.values(),
    *({**stage, **CHECKPOINTED} for stage in STAGES.values()),
    {**STAGES[2], **OFFLOADED},
    {**STAGES[3], **OFFLOADED, "offload_param": "cpu", **CHECKPOINTED, "checkpoint_input": "cpu"},
    {**CHECKPOINTED, "checkpoint_blocks": "half", "checkpoint_part": "attention"},
]


def peak(measurement: Measurement, phase: str, meter: str = "allocated") -> int:
    """The most that any rank allocated in a phase (or what was live at its end), bytes."""
    assert measurement.outcome is Outcome.OK, measurement
    return max(int(meters[meter]) for meters in measurement.memory[phase])


class TestLosses:
    def test_of_every_stage_with_and_without_checkpointing_and_offload_agree_to_rounding(self, probe: Probe) -> None:
        losses = [probe(replace(PLAIN, **variant)).losses[:2] for variant in VARIANTS]
        # bf16 keeps 8 bits; the mean over 256 tokens of two micro-batches differs far less. Untrained weights give
        # about ln(vocabulary); what zero.Init leaves without our weights gives 88.
        assert all(first == pytest.approx(losses[0][0], rel=2**-12) for first, _ in losses)
        assert all(second == pytest.approx(losses[0][1], rel=2**-10) for _, second in losses)
        assert losses[0][0] == pytest.approx(8.3, abs=0.2)

    def test_in_fp32_agree_to_six_digits_whatever_the_micro_batch(self, probe: Probe) -> None:
        exact = [
            probe(replace(PLAIN, precision="fp32", **variant), "workload.precision=fp32").losses[0]
            for variant in (STAGES[1], STAGES[3], {"micro_batch": 4, "accumulation": 1}, CHECKPOINTED)
        ]
        assert all(loss == pytest.approx(exact[0], rel=1e-6) for loss in exact)


class TestMemory:
    def test_states_are_partitioned_offloaded_and_gone_from_the_device(self, probe: Probe) -> None:
        at_rest = {
            name: peak(probe(replace(PLAIN, **variant)), "step", "live")
            for name, variant in {
                "whole": STAGES[0],
                "partitioned": STAGES[1],
                "offloaded": OFFLOADED,
                "all offloaded": {**STAGES[3], **OFFLOADED, "offload_param": "cpu"},
            }.items()
        }
        share = PARAMETERS // 2
        # fp32 master and two moments of the other half of the parameters, less the reduce bucket of stage 1
        assert at_rest["whole"] - at_rest["partitioned"] == pytest.approx(12 * share - 2 * 2_000_000, rel=0.01)
        assert at_rest["partitioned"] - at_rest["offloaded"] == pytest.approx(12 * share, rel=0.5)
        # what stays: bf16 parameters, their gradients until they are collected, the bucket, a buffer of one parameter
        assert at_rest["offloaded"] < (2 + 2) * PARAMETERS + 2 * 2_000_000 + 2**21
        assert at_rest["all offloaded"] < at_rest["offloaded"] + 2 * PARAMETERS

    def test_checkpointing_lowers_the_peak_and_saving_inputs_on_the_host_lowers_it_further(self, probe: Probe) -> None:
        big = replace(PLAIN, micro_batch=4, accumulation=1)
        whole = [replace(big, **CHECKPOINTED), replace(big, **{**CHECKPOINTED, "checkpoint_input": "cpu"})]
        part = replace(big, **{**CHECKPOINTED, "checkpoint_part": "mlp"})
        none, device, host, mlp = (peak(probe(candidate), "forward") for candidate in (big, *whole, part))
        inputs = 6 * 4 * 64 * 128 * 2  # blocks × sequences × tokens × hidden × bytes of bf16
        assert host < device < mlp < none
        assert device - host == pytest.approx(inputs, rel=0.25)

    def test_a_device_that_is_just_too_small_is_an_oom_where_one_that_just_suffices_is_not(self, probe: Probe) -> None:
        free = probe(PLAIN, "machine.device_memory_gib=1")
        assert free.peak_allocated_bytes
        enough = (free.peak_allocated_bytes + 2**20) / GIB
        short = free.peak_allocated_bytes * 0.97 / GIB
        assert probe(PLAIN, f"machine.device_memory_gib={enough}").peak_allocated_bytes == free.peak_allocated_bytes
        oom = probe(PLAIN, f"machine.device_memory_gib={short}")
        assert oom.outcome is Outcome.OOM_DEVICE
        assert oom.phase in (Phase.FORWARD, Phase.BACKWARD)
        assert oom.needed_bytes
        assert short * GIB < oom.needed_bytes <= free.peak_allocated_bytes

    def test_that_the_host_holds_is_not_the_devices_limit(self, probe: Probe) -> None:
        offloaded = replace(PLAIN, **OFFLOADED)
        free = probe(offloaded, "machine.device_memory_gib=1")
        assert free.peak_allocated_bytes
        tight = f"machine.device_memory_gib={(free.peak_allocated_bytes + 2**20) / GIB}"
        assert probe(offloaded, tight).outcome is Outcome.OK
        assert probe(PLAIN, tight).outcome is Outcome.OOM_DEVICE


class TestSpeed:
    def test_is_global_tokens_over_the_median_step_with_its_spread(self, probe: Probe) -> None:
        measured = probe(PLAIN, steps=3)
        assert len(measured.step_times_s) == 3
        assert measured.step_s == sorted(measured.step_times_s)[1]
        assert measured.tokens_per_s == pytest.approx(8 * 64 / measured.step_s)
        assert measured.tokens_per_s_low == pytest.approx(8 * 64 / max(measured.step_times_s))
        assert measured.tokens_per_s_high == pytest.approx(8 * 64 / min(measured.step_times_s))
        assert measured.overhead_s is not None
        assert 0 < measured.overhead_s < measured.wall_s

    def test_a_probe_that_cannot_win_ends_early_with_its_memory_measured(self, probe: Probe) -> None:
        hopeless = probe(PLAIN, steps=50, stop_below_tokens_per_s=1e9)
        assert hopeless.outcome is Outcome.STOPPED
        assert len(hopeless.step_times_s) == 2
        assert hopeless.peak_allocated_bytes
        assert hopeless.tokens_per_s == pytest.approx(8 * 64 / min(hopeless.step_times_s))

    def test_threads_and_processors_are_set_and_recorded(self, probe: Probe) -> None:
        environment = probe(PLAIN, "probe.threads=1").environment
        assert environment["threads"] == 1
        assert environment["torch"]
        assert environment["deepspeed"]


def test_a_cold_torchrun_measures_the_same_as_the_warm_launcher(probe: Probe) -> None:
    warm = probe(PLAIN)
    composed = settings("launcher=cold")
    prober = TorchrunProber(composed, make_launcher(composed))
    cold = prober.probe(ProbeRequest(PLAIN, steps=1))
    prober.close()
    assert (cold.outcome, cold.losses) == (warm.outcome, warm.losses)
    for phase in ("load", "init", "first_step", "forward", "backward", "step"):
        assert peak(cold, phase) == peak(warm, phase)
    assert cold.environment["launcher"] == "cold"


def test_sampled_accumulation_is_solved_from_windows_and_has_the_memory_of_the_whole(
    launcher: Launcher, probe: Probe, tmp_path: Path
) -> None:
    long = replace(PLAIN, micro_batch=1, accumulation=4)
    whole = probe(long)
    prober = TorchrunProber(settings(), launcher)
    prober.describe()
    spec = prober.spec(ProbeRequest(long, steps=2), tmp_path)
    sampled = dataclasses.replace(spec, sampled_accumulation=True)
    report = launcher.run(sampled.write(), 2, 60.0)
    assert report["exit_codes"] == {}
    result = RankResult.read(tmp_path, 0)
    assert result is not None
    assert len(result.step_times_s) == 2
    assert min(result.step_times_s) > 0
    for phase in ("first_step", "forward", "backward", "step"):
        # beside the batches that wait on the host, which is the device here too
        assert result.memory[phase]["allocated"] == pytest.approx(whole.memory[phase][0]["allocated"], abs=8192)
