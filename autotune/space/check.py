"""What a DeepSpeed config gets wrong: every rule that it breaks, the silent ones first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.space.rule import Kind, Rule, Situation
from autotune.space.rules import RULES
from autotune.workload.workload import Workload

_SILENT_FIRST = {Kind.IGNORE: 0, Kind.CHANGE: 1, Kind.REFUSE: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule broken in one place.

    Attributes:
        rule: the rule.
        where: the key, as a dotted path.
        sentence: what DeepSpeed does about it.
        remedy: what to write instead.
    """

    rule: Rule
    where: str
    sentence: str
    remedy: str


def findings(config: Mapping[str, Any], workload: Workload, machine: Machine) -> list[Finding]:
    """Every rule that a DeepSpeed config breaks for this workload on this machine, the silent ones first.

    Args:
        config: as `read_config` gives it.
        workload: what would be trained with it.
        machine: where; its world size decides about the batch.
    """
    situation = Situation(config, machine.world_size, machine.accelerator, own_model=bool(workload.model.factory))
    found = [
        Finding(rule, where, rule.sentence + (f" ({rule.note(situation, where)})" if rule.note else ""), rule.remedy)
        for rule in RULES
        for where in rule.broken(situation)
    ]
    return sorted(found, key=lambda finding: _SILENT_FIRST[finding.rule.kind])


def read_config(path: str | Path) -> dict[str, Any]:
    """The DeepSpeed config in a JSON file.

    Raises:
        SettingsError: the file cannot be read, is not JSON, repeats a key, or holds something other than an object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}", "name a DeepSpeed config, a JSON file"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not a text file", "name a DeepSpeed config, a JSON file") from error
    try:
        config = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise SettingsError(
            f"{path} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}", "DeepSpeed reads JSON"
        ) from error
    except _RepeatedKeyError as error:
        raise SettingsError(
            f"{path} has the key {error} twice", "DeepSpeed refuses repeated keys: take one out"
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"{path} does not hold a JSON object", "a DeepSpeed config starts with {")
    return config


class _RepeatedKeyError(Exception):
    """A JSON object has a key twice."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for name, value in pairs:
        if name in known:
            raise _RepeatedKeyError(name)
        known[name] = value
    return known
