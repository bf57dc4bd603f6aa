"""Rules about the three batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.space.rule import Kind, Rule, Situation

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_SIZES = (TRAIN, MICRO, STEPS)


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _sizes(situation: Situation) -> tuple[float | None, ...]:
    return tuple(value if _is_size(value := situation.written(name)) else None for name in _SIZES)


def _ranks(situation: Situation) -> float:
    """Data-parallel ranks, as DeepSpeed counts them for the batch."""
    return situation.world_size / float(situation.get("sequence_parallel_size", 1))


def _unequal(situation: Situation) -> bool:
    train, micro, steps = _sizes(situation)
    if train is None or any(situation.has(name) and not _is_size(situation.written(name)) for name in _SIZES):
        return False
    ranks = _ranks(situation)
    if micro is not None and steps is not None:
        return train != micro * steps * ranks
    return train % ((micro or steps or 1) * ranks) != 0


def _arithmetic(situation: Situation, key: str) -> str:
    train, micro, steps = _sizes(situation)
    return f"{train} ≠ {micro or '?'} × {steps or '?'} × {_ranks(situation):g}"


def _not_sizes(situation: Situation) -> Iterator[str]:
    for name in _SIZES:
        value = situation.written(name)
        if situation.has(name) and value is not None and not _is_size(value):
            yield name


def _missing(situation: Situation) -> list[str]:
    return [] if situation.has(TRAIN) or situation.has(MICRO) else [MICRO]


IDENTITY = Rule(
    id="batch_identity",
    kind=Kind.REFUSE,
    keys=(TRAIN,),
    when=_unequal,
    note=_arithmetic,
    sentence="The global batch must be micro-batch × accumulation × data-parallel devices.",
    remedy="take train_batch_size out: DeepSpeed derives it from the other two and the devices",
    source="runtime/config.py: _batch_assertion",
)

RULES = (
    IDENTITY,
    Rule(
        id="batch_number",
        kind=Kind.REFUSE,
        keys=_SIZES,
        where=_not_sizes,
        note=lambda s, key: f"it is {s.written(key)!r}",
        sentence='Batch sizes must be numbers above 0: DeepSpeed itself knows no "auto" and no lists here.',
        remedy='write the number; "auto" is for the Hugging Face Trainer, which replaces it',
        source="runtime/config.py: _set_batch_related_parameters, _batch_assertion",
    ),
    Rule(
        id="batch_missing",
        kind=Kind.REFUSE,
        keys=(TRAIN, MICRO),
        where=_missing,
        sentence="Either the global batch or the micro-batch must be given.",
        remedy="write train_micro_batch_size_per_gpu",
        source="runtime/config.py: _set_batch_related_parameters",
    ),
)
