"""A store with two studies in it, made without any process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.store.store import Store
from autotune.workload.phase import Phase
from autotune.workload.workload import Model, Workload

GIB = 2**30
WORKLOAD = Workload(model=Model(name="llama3_8b", type="llama"), seq_len=4096, global_batch=512)
A100 = Machine(name="a100_80g", device="NVIDIA A100-SXM4-80GB", device_memory_gib=79.1, devices_per_node=8)
H100 = Machine(name="h100_80g", device="NVIDIA H100 80GB HBM3", device_memory_gib=79.1, devices_per_node=4)
PLAIN = Candidate(micro_batch=1, accumulation=64, zero_stage=1, precision="bf16")
BEST = Candidate(micro_batch=4, accumulation=16, zero_stage=2, precision="bf16")


def _ok(rate: float, half_spread: float | None = 100.0, **more: Any) -> Measurement:
    ends = {"tokens_per_s_low": rate - half_spread, "tokens_per_s_high": rate + half_spread} if half_spread else {}
    values = {
        "probe_kind": "torchrun",
        "tokens_per_s": rate,
        "step_s": 2_097_152 / rate,
        "peak_allocated_bytes": 50 * GIB,
        "peak_reserved_bytes": 60 * GIB,
        "host_peak_bytes": 20 * GIB,
        "wall_s": 61.5,
    }
    return Measurement(outcome=Outcome.OK, **(values | ends | more))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'autotune.db'}")
    opened.open_study("a", WORKLOAD, A100)
    opened.add_probe("a", PLAIN, _ok(30_000.0))
    out = Measurement(
        Outcome.OOM_DEVICE, "torchrun", phase=Phase.FORWARD, message="OutOfMemoryError: [CUDA] …", wall_s=9
    )
    opened.add_probe("a", BEST.replace(micro_batch=8, accumulation=8), out)
    opened.add_probe("a", BEST.replace(micro_batch=16, accumulation=4), out, inferred=True)
    opened.add_probe("a", BEST, _ok(40_000.0), confirmation=True)
    opened.set_winner("a", 4)
    opened.open_study("b", WORKLOAD, H100)
    opened.add_probe("b", BEST.replace(zero_stage=3, accumulation=32), _ok(60_000.0))
    opened.set_winner("b", 1)
    opened.open_study("empty", WORKLOAD, A100)
    yield opened
    opened.close()


@pytest.fixture
def ok() -> Callable[..., Measurement]:
    """Makes an `ok` measurement from its tokens/s and half its spread (None: no spread)."""
    return _ok
