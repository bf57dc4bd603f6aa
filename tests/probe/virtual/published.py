"""Two trainings that others measured on GPUs, and what is predicted for them; for a test and for the benchmark."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from autotune.probe.virtual.prediction import Prediction
from autotune.probe.virtual.prober import VirtualProber
from autotune.settings import Settings, compose_settings
from autotune.space.space import Space

SOURCE = "public student project on 4 × GH200, DeepSpeed 0.18"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Published:
    """One training of an 8.05 B model (gh200_model.py), as torch's counters showed it. GB of 1e9 bytes.

    Attributes:
        zero_stage: of ZeRO; DeepSpeed's default buckets, overlap_comm, contiguous_gradients, clipping 1.0, FusedAdam,
            bf16, micro-batch 1, no accumulation, sequence 2048.
        peaks: max_memory_allocated of each rank.
        steady: allocated between two steps.
        reserved: max_memory_reserved of the rank with most.
    """

    zero_stage: int
    peaks: tuple[float, ...]
    steady: float
    reserved: float


ROWS = (
    Published(1, (57.59, 57.59, 58.70, 61.47), 40.33, 77.55),
    Published(3, (52.6, 52.6, 52.6, 52.6), 33.28, 62.6),
)
OVERRIDES = """
    model=custom model.name=gh200_8b model.factory=tests.probe.virtual.gh200_model:build
    workload.seq_len=2048 workload.global_batch=4 workload.gradient_clipping=1.0
    machine=gh200_96g machine.devices_per_node=4
    space.micro_batch=1 space.zero_stage=[1,3] space.overlap_comm=true
    space.offload_optimizer=none space.offload_param=none space.checkpoint_blocks=none
"""


def settings() -> Settings:
    """Settings whose space is the two trainings."""
    return compose_settings(OVERRIDES.split())


def predictions() -> dict[int, Prediction]:
    """ZeRO stage → what is predicted; traced, unless the cache (XDG_CACHE_HOME) knows it."""
    given = settings()
    with contextlib.chdir(ROOT):  # where the model's factory is imported from
        prober = VirtualProber(given)
        try:
            candidates = Space(given).candidates
            prober.prepare(candidates, lambda done, of: None)
            return {candidate.zero_stage: prober.predict(candidate) for candidate in candidates}
        finally:
            prober.close()


def peaks(prediction: Prediction) -> list[int]:
    """Peak allocated of each rank, bytes: of stage 3, where ranks are alike, one is traced for all."""
    return [prediction.ranks.get(rank, prediction.peak_allocated) for rank in range(4)]
