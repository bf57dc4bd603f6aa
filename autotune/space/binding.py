"""Binding one knob to a value: what remains of the value beside the knobs bound before, by the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.machine.machine import Machine
from autotune.space.config import workload_config
from autotune.space.knobs import BY_NAME, KNOBS, Knob, Value
from autotune.space.rule import Kind, Rule, Situation
from autotune.space.rules import RULES
from autotune.workload.workload import Workload

_ORDER = {knob.name: position for position, knob in enumerate(KNOBS)}


@dataclass(frozen=True, slots=True)
class Bound:
    """What became of one value.

    Attributes:
        value: the value in effect; None where the knob has no effect.
        rule: the rule that refused, ignored or changed it; None where it stays as written.
    """

    value: Value
    rule: Rule | None = None

    @property
    def refused(self) -> bool:
        """Whether DeepSpeed refuses the value beside the others."""
        return self.rule is not None and self.rule.kind is Kind.REFUSE


class Binder:
    """Binds knobs in the order of KNOBS for one workload on one machine.

    What becomes of a value depends on few other knobs (`Rule.knobs`), so outcomes are kept and large spaces stay cheap.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload_config(workload)
        self._machine = machine
        self._rules = {knob.name: _rules_for(knob) for knob in KNOBS}
        self._conditions = {
            name: sorted({other for rule in rules for other in rule.knobs} - {name}, key=_ORDER.__getitem__)
            for name, rules in self._rules.items()
        }
        self._kept: dict[tuple[Any, ...], Bound] = {}

    def bind(self, name: str, value: Value, bound: Mapping[str, Value]) -> Bound:
        """What becomes of `value` for the knob `name`, given the canonical values of the knobs before it."""
        if name == "overlap_comm" and value is None:
            value = bound["zero_stage"] == 3
        conditions = {other: bound[other] for other in self._conditions[name]}
        kept = (name, value, *conditions.values())
        if kept not in self._kept:
            self._kept[kept] = self._bind(name, value, conditions)
        return self._kept[kept]

    def _bind(self, name: str, value: Value, conditions: Mapping[str, Value]) -> Bound:
        situation = self.situation({**conditions, name: value})
        changed: Rule | None = None
        for rule in self._rules[name]:
            if not rule.broken(situation):
                continue
            if rule.kind is not Kind.CHANGE:
                return Bound(None, rule)
            assert rule.becomes is not None
            changed = rule
            value = rule.becomes(situation)
            situation = self.situation({**conditions, name: value})
        return Bound(value, changed)

    def situation(self, values: Mapping[str, Value]) -> Situation:
        """The part of a DeepSpeed config, and beside it our own knobs, that these values make."""
        config: dict[str, Any] = {**self._workload}
        own: dict[str, Value] = {}
        for name, value in values.items():
            key = BY_NAME[name].key
            if value is None:
                continue
            if name == "precision":
                config |= {str(value): {"enabled": True}} if value != "fp32" else {}
            elif key == name:
                own[name] = value
            else:
                *sections, last = key.split(".")
                place = config
                for section in sections:
                    place = place.setdefault(section, {})
                place[last] = value
        return Situation(config, self._machine.world_size, self._machine.accelerator, own)


def _rules_for(knob: Knob) -> tuple[Rule, ...]:
    """Refusals that can be decided once this knob is bound, and what would make its value another."""
    return tuple(
        rule
        for rule in RULES
        if (
            bool(rule.knobs) and max(rule.knobs, key=_ORDER.__getitem__) == knob.name
            if rule.kind is Kind.REFUSE
            else knob.key in rule.keys
        )
    )
