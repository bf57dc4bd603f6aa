"""One fork server and one tiny model serve the tests of real probes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.settings import Settings, compose_settings

QUICK = ["machine=cpu", "probe.steps=1", "probe.warmup_steps=1", "workload.seq_len=64", "workload.global_batch=8"]
PLAIN = Candidate(
    micro_batch=2,
    accumulation=2,
    zero_stage=1,
    precision="bf16",
    overlap_comm=False,
    reduce_bucket_size=2_000_000,
    allgather_bucket_size=2_000_000,
)
STAGE3 = {
    "zero_stage": 3,
    "overlap_comm": None,
    "allgather_bucket_size": None,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "zero_hpz_partition_size": 1,
}
STAGES: dict[int, dict[str, Any]] = {
    0: {"zero_stage": 0, "overlap_comm": None, "reduce_bucket_size": None, "allgather_bucket_size": None},
    1: {},
    2: {"zero_stage": 2},
    3: STAGE3,
}
CHECKPOINTED = {"checkpoint_blocks": "all", "checkpoint_part": "whole", "checkpoint_input": "device"}

Probe = Callable[..., Measurement]


def settings(*overrides: str) -> Settings:
    """Settings in which a probe of gpt_tiny takes two or three seconds."""
    return compose_settings([*QUICK, *overrides])


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """A warm launcher, its fork server started once."""
    warm = make_launcher(settings())
    yield warm
    warm.close()


@pytest.fixture
def probe(launcher: Launcher) -> Iterator[Probe]:
    """Probe a candidate under some overrides; afterwards nothing of it is left, whatever became of it."""
    shared = _shared_memory()

    def run(candidate: Candidate, *overrides: str, **request: Any) -> Measurement:
        prober = TorchrunProber(settings(*overrides), launcher)
        return prober.probe(ProbeRequest(candidate, **{"steps": 1, **request}))

    yield run
    assert strangers() == []
    deadline = time.monotonic() + 5
    while _shared_memory() - shared and time.monotonic() < deadline:  # of others who are at work on this machine
        time.sleep(0.1)
    assert _shared_memory() <= shared


def strangers() -> list[str]:
    """Processes below this one that are neither the launcher's host nor what it keeps: the fork server, the tracker."""
    kept = ("probe.torchrun.host", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line, parent = " ".join(process.cmdline()), process.parent()
            forked = parent is not None and kept[1] in " ".join(parent.cmdline())  # a rank looks like the fork server
        except psutil.NoSuchProcess:
            continue
        if forked or not any(name in line for name in kept):
            found.append(f"{process.pid} {process.status()} {line}")
    return found


def _shared_memory() -> set[str]:
    """What DeepSpeed's collectives have put into shared memory."""
    return {path.name for path in Path("/dev/shm").glob("deepspeed_*")}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: Probe) -> Callable[..., Measurement]:
    """Probe a small custom model that does what `fault` says (see faulty.py)."""
    monkeypatch.chdir(Path(__file__).parent)

    def run(
        fault: str, candidate: Candidate = PLAIN, *overrides: str, confirm_steps: int = 0, **arguments: Any
    ) -> Measurement:
        values = ",".join(f"{name}:{value}" for name, value in {"fault": fault, **arguments}.items())
        model = ["model=custom", "model.factory=faulty:build", f"+model.args={{{values}}}", *QUICK[3:]]
        request = {"steps": confirm_steps, "confirmation": True} if confirm_steps else {}
        return probe(candidate, *model, "probe.deadline_s=20", *overrides, **request)

    return run


def replace(candidate: Candidate, **changes: Any) -> Candidate:
    """A candidate with some knobs changed."""
    return dataclasses.replace(candidate, **changes)
