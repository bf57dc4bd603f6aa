"""Rules about the three batch sizes."""

from __future__ import annotations

from autotune.space.rule import Kind, Rule, Situation

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def _sizes(situation: Situation) -> tuple[int | None, int | None, int | None]:
    train, micro, steps = (
        value if isinstance(value := situation.get(name), int) and not isinstance(value, bool) else None
        for name in (TRAIN, MICRO, STEPS)
    )
    return train, micro, steps


def _unequal(situation: Situation) -> bool:
    train, micro, steps = _sizes(situation)
    if train is None or (micro is None and steps is None):
        return False
    world = situation.world_size
    return train != micro * steps * world if micro and steps else train % ((micro or steps or 1) * world) != 0


def _arithmetic(situation: Situation) -> str:
    train, micro, steps = _sizes(situation)
    return f"{train} ≠ {micro or '?'} × {steps or '?'} × {situation.world_size}"


IDENTITY = Rule(
    id="batch_identity",
    kind=Kind.REFUSE,
    keys=(TRAIN,),
    when=_unequal,
    note=_arithmetic,
    sentence="The global batch must be micro-batch × accumulation × devices.",
    remedy="take train_batch_size out: DeepSpeed derives it from the other two and the world size",
    source="runtime/config.py: _batch_assertion",
)

RULES = (IDENTITY,)
