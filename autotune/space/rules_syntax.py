"""Rules about keys and values that DeepSpeed does not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from autotune.space.rule import Kind, Rule, Situation
from autotune.space.schema import LENIENT, REMOVED, SIZES, STRICT, TOP_LEVEL

_AUTO_SECTIONS = [name for name in STRICT if name != "zero_optimization.zenflow"]  # "auto" is a value of its own there


def _auto_dropped(situation: Situation) -> Iterator[str]:
    for section in _AUTO_SECTIONS:
        for name, value in situation.section(section).items():
            if value == "auto":
                yield f"{section}.{name}"


def _what_auto_means(situation: Situation, key: str) -> str:
    if key in ("fp16.enabled", "bf16.enabled"):
        return f"{key.split('.')[0]} stays off: the run is {situation.precision}"
    if key == "zero_optimization.stage":
        return "the stage is 0"
    return "its default is used"


def _auto_refused(situation: Situation) -> Iterator[str]:
    if situation.written("gradient_clipping") == "auto":
        yield "gradient_clipping"
    for section in ("optimizer.params", "scheduler.params"):
        for name, value in situation.section(section).items():
            if value == "auto":
                yield f"{section}.{name}"


def _unknown(situation: Situation, sections: Iterable[tuple[str, frozenset[str]]]) -> Iterator[str]:
    for section, known in sections:
        for name in situation.section(section):
            key = f"{section}.{name}"
            if name not in known and key not in REMOVED:
                yield key


def _unknown_top_level(situation: Situation) -> Iterator[str]:
    for name in situation.config:
        if name not in TOP_LEVEL and name not in REMOVED and not name.startswith("_"):
            yield name
    yield from _unknown(situation, LENIENT.items())


def _nearest(situation: Situation, key: str) -> str:
    """The known key that looks most like this one."""
    section, _, name = key.rpartition(".")
    known = STRICT.get(section) or LENIENT.get(section) or TOP_LEVEL
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {section + '.' if section else ''}{near[0]}?" if near else "no key looks like it"


def _bad_sizes(situation: Situation) -> Iterator[str]:
    for key, least in SIZES.items():
        value = situation.get(key)
        if isinstance(value, int | float) and (value < least or value != int(value)):
            yield key


def _bad_stage(situation: Situation) -> list[str]:
    stage = situation.written("zero_optimization.stage")
    known = ("0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0", "True", "False", "auto")
    return [] if not situation.has("zero_optimization.stage") or str(stage) in known else ["zero_optimization.stage"]


RULES = (
    Rule(
        id="auto_dropped",
        kind=Kind.IGNORE,
        keys=(),
        where=_auto_dropped,
        note=_what_auto_means,
        sentence='"auto" is for the Hugging Face Trainer, which replaces it; DeepSpeed itself drops the key.',
        remedy="write the value",
        source="runtime/config_utils.py: DeepSpeedConfigModel.__init__",
    ),
    Rule(
        id="unknown_key",
        kind=Kind.IGNORE,
        keys=(),
        where=_unknown_top_level,
        note=_nearest,
        sentence="DeepSpeed does not know this key and passes over it.",
        remedy="correct the spelling, or take the key out",
        source="runtime/config.py: DeepSpeedConfig._initialize_params",
    ),
    Rule(
        id="unknown_section_key",
        kind=Kind.REFUSE,
        keys=(),
        where=lambda s: _unknown(s, STRICT.items()),
        note=_nearest,
        sentence="DeepSpeed does not know this key and refuses it.",
        remedy="correct the spelling, or take the key out",
        source="runtime/config_utils.py: DeepSpeedConfigModel.model_config",
    ),
    Rule(
        id="removed_key",
        kind=Kind.REFUSE,
        keys=(),
        where=lambda s: [key for key in REMOVED if s.has(key)],
        sentence="This feature is gone from DeepSpeed, which refuses what is left of it in the config.",
        remedy="take the key out",
        source="runtime/config.py: _reject_removed_config_keys",
        versions=">=0.19.8",
    ),
    Rule(
        id="auto_refused",
        kind=Kind.REFUSE,
        keys=(),
        where=_auto_refused,
        sentence='"auto" is for the Hugging Face Trainer, which replaces it; DeepSpeed computes with it and fails.',
        remedy="write the number",
        source="runtime/engine.py: _configure_basic_optimizer, _scheduler_from_config",
    ),
    Rule(
        id="size_number",
        kind=Kind.REFUSE,
        keys=(),
        where=_bad_sizes,
        note=lambda s, key: f"it is {s.written(key)}",
        sentence="Sizes are whole numbers, not below 0, and a reduce bucket holds at least one element.",
        remedy="write a whole number",
        source="runtime/zero/config.py: DeepSpeedZeroConfig",
    ),
    Rule(
        id="stage_number",
        kind=Kind.REFUSE,
        keys=("zero_optimization.stage",),
        where=_bad_stage,
        sentence="The ZeRO stage is 0, 1, 2 or 3.",
        remedy="write one of them",
        source="runtime/zero/config.py: ZeroStageEnum",
    ),
    Rule(
        id="deprecated_offload",
        kind=Kind.REFUSE,
        keys=("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"),
        where=lambda s: [
            f"zero_optimization.{old}"
            for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param"))
            if s.has(f"zero_optimization.{old}") and s.has(f"zero_optimization.{new}")
        ],
        sentence="The old cpu_offload keys cannot stand beside the new offload sections.",
        remedy="take the old key out",
        source="runtime/config_utils.py: _process_deprecated_field",
    ),
)
