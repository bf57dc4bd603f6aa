"""DeepSpeed config to candidate: the knobs that a config sets, and those that no config can say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.settings import SpaceSettings
from autotune.space.knobs import KNOBS, choices
from autotune.space.rule import ZERO, Situation


def candidate_of(config: Mapping[str, Any], machine: Machine, space: SpaceSettings) -> Candidate:
    """The candidate that a DeepSpeed config describes.

    Args:
        config: one that DeepSpeed takes, see space.check.
        machine: its world size completes the batch, as DeepSpeed does.
        space: fixes, by a scalar, the knobs that DeepSpeed's config has no key for: what is checkpointed, and the
            allocator's settings. What it lists or leaves out is off.
    """
    situation = Situation(config, machine.world_size, machine.accelerator)
    micro_batch, accumulation = batch(situation)
    values: dict[str, Any] = {
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "zero_stage": situation.stage,
        "precision": situation.precision,
    }
    for knob in KNOBS:
        if knob.key.startswith(ZERO) and knob.name not in values:
            written = situation.get(knob.key)
            values[knob.name] = int(written) if isinstance(written, float) else written  # 5e8 is a float to JSON
    for name in ("offload_optimizer", "offload_param"):
        values[name] = None if values[name] == "none" else values[name]
    return Candidate(**values, **_unwritten(space))


def batch(situation: Situation) -> tuple[int, int]:
    """(micro-batch, accumulation) of a config that gives one or two of its three batch sizes, or all."""
    whole, micro, accumulation = (
        situation.get(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if micro is None:
        accumulation = accumulation or 1
        return whole // situation.world_size // accumulation, accumulation
    return micro, accumulation or (whole // situation.world_size // micro if whole else 1)


def _unwritten(space: SpaceSettings) -> dict[str, Any]:
    """The knobs that DeepSpeed's config has no key for."""
    fixed: dict[str, Any] = {}
    for knob in KNOBS:
        setting = getattr(space, knob.name)
        if knob.key == knob.name and knob.name != "precision" and isinstance(setting, str | bool | int | float):
            fixed[knob.name] = choices(knob, setting)[0]
    if fixed.get("checkpoint_blocks", "none") == "none":
        return {name: value for name, value in fixed.items() if not name.startswith("checkpoint_")}
    return {"checkpoint_part": "whole", "checkpoint_input": "device"} | fixed
