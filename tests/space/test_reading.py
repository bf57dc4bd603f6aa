"""The candidate that a DeepSpeed config describes."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.settings import Settings, SpaceSettings, compose_settings
from autotune.space.config import deepspeed_config
from autotune.space.reading import candidate_of
from autotune.space.space import Space

MACHINE = Machine(name="gpus", nodes=2, devices_per_node=4)
UNWRITTEN = ("checkpoint_blocks", "checkpoint_part", "checkpoint_input", "expandable_segments")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return compose_settings(["model=gpt20b", "machine=a100_40g", "space=comm"])


def test_what_is_written_for_a_candidate_reads_as_that_candidate(settings: Settings) -> None:
    for candidate in Space(settings).candidates[::97]:
        config = deepspeed_config(candidate, settings.workload, settings.machine)
        fixed = SpaceSettings(**{name: getattr(candidate, name) for name in UNWRITTEN})
        assert candidate_of(config, settings.machine, fixed) == candidate


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "accumulation"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, 3, 1),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 3, 5),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3}, 3, 2),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 2}, 3, 2),
        ({"train_batch_size": 48}, 6, 1),
    ],
)
def test_the_batch_is_completed_as_deepspeed_does(sizes: dict[str, int], micro_batch: int, accumulation: int) -> None:
    candidate = candidate_of(sizes, MACHINE, SpaceSettings())
    assert (candidate.micro_batch, candidate.accumulation) == (micro_batch, accumulation)


def test_words_that_mean_nothing_are_nothing() -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "overlap_comm": "auto"},
    }
    assert candidate_of(config, MACHINE, SpaceSettings(checkpoint_blocks=["none", "all"])) == Candidate(
        micro_batch=1, accumulation=1, zero_stage=2, precision="fp32"
    )
