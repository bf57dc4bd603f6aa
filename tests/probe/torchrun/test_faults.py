"""Whatever a rank does, the probe has the right outcome, ends in time, and the next one is none the worse."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.torchrun.warm import Warm
from autotune.workload.phase import Phase

from .conftest import CHECKPOINTED, PLAIN, STAGES, Probe, replace

Faulty = Callable[..., Measurement]


@pytest.mark.parametrize(
    ("fault", "outcome", "phase", "message"),
    [
        ("none", Outcome.OK, None, ""),
        ("load", Outcome.CRASHED, Phase.LOAD, "cannot read the weights"),
        ("raise", Outcome.CRASHED, Phase.FORWARD, "ValueError: the model says no"),
        ("no_loss", Outcome.CRASHED, Phase.FORWARD, "without a scalar loss"),
        ("vanish", Outcome.CRASHED, Phase.FORWARD, "rank 1 ended without a result"),
        ("kill", Outcome.CRASHED, Phase.FORWARD, "rank 1 was killed by SIGKILL"),
        ("memory", Outcome.CRASHED, Phase.FORWARD, "MemoryError"),  # far from the device's limit: not its OOM
        ("not_finite", Outcome.DIVERGED, None, "is nan"),
    ],
)
def test_a_fault_on_one_rank_is_told_as_what_it_is(
    faulty: Faulty, fault: str, outcome: Outcome, phase: Phase | None, message: str
) -> None:
    measured = faulty(fault)
    assert measured.outcome is outcome, measured
    assert message in (measured.message or "")
    if phase is not None:
        assert measured.phase is phase
    assert measured.wall_s < 15


@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_a_rank_that_hangs_is_ended_at_the_deadline(faulty: Faulty, probe: Probe, fault: str) -> None:
    began = time.monotonic()
    measured = faulty(fault, PLAIN, "probe.deadline_s=5")
    assert time.monotonic() - began < 5 + 10
    assert measured.outcome is Outcome.TIMEOUT
    assert measured.phase is Phase.FORWARD
    assert probe(PLAIN).outcome is Outcome.OK


def test_a_skipped_step_is_not_a_step(faulty: Faulty) -> None:
    measured = faulty("overflow", replace(PLAIN, accumulation=1, micro_batch=4))
    assert measured.outcome is Outcome.OK, measured
    assert measured.skipped_steps == 3
    states = 12 * (256 * 64 + 4 * (2 * 64 * 256 + 256 + 64)) // 2
    assert max(int(meters["live"]) for meters in measured.memory["step"]) > states


def test_what_deepspeed_refuses_is_invalid(probe: Probe) -> None:
    odd = probe(replace(PLAIN, allgather_bucket_size=2_000_001))
    assert odd.outcome is Outcome.INVALID
    assert odd.phase is Phase.INIT


class TestCheckpointing:
    def test_of_a_custom_model_is_real(self, faulty: Faulty) -> None:
        plain, checkpointed = (
            faulty("none", replace(PLAIN, micro_batch=4, accumulation=1, **knobs)) for knobs in ({}, CHECKPOINTED)
        )
        assert plain.losses == checkpointed.losses
        peaks = [max(int(m["allocated"]) for m in x.memory["forward"]) for x in (plain, checkpointed)]
        assert peaks[1] < peaks[0]

    def test_works_where_zero_partitions_a_custom_models_parameters(self, faulty: Faulty) -> None:
        assert faulty("none", replace(PLAIN, **STAGES[3], **CHECKPOINTED)).outcome is Outcome.OK

    def test_without_an_effect_is_a_crash_that_says_so(self, faulty: Faulty) -> None:
        bypassed = faulty("bypass", replace(PLAIN, **CHECKPOINTED))
        assert bypassed.outcome is Outcome.CRASHED
        assert "never called as a module" in (bypassed.message or "")

    def test_of_a_model_without_blocks_or_without_such_a_part_is_a_crash_that_says_so(self, faulty: Faulty) -> None:
        alone = faulty("none", replace(PLAIN, **CHECKPOINTED), blocks=1)
        assert alone.outcome is Outcome.CRASHED
        assert "no list of repeated blocks" in (alone.message or "")
        no_attention = faulty("none", replace(PLAIN, **{**CHECKPOINTED, "checkpoint_part": "attention"}))
        assert no_attention.outcome is Outcome.CRASHED
        assert "no part named like its attention" in (no_attention.message or "")


def test_a_killed_host_process_is_our_trouble_and_the_next_probe_has_a_new_one(
    faulty: Faulty, probe: Probe, launcher: Warm
) -> None:
    assert probe(PLAIN).outcome is Outcome.OK
    assert launcher.pid is not None
    timer = threading.Timer(2.0, os.kill, (launcher.pid, signal.SIGKILL))
    timer.start()
    assert faulty("hang").outcome is Outcome.INFRA
    timer.join()
    assert probe(PLAIN).outcome is Outcome.OK
