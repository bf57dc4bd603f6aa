"""All rules, in the order in which they are tried."""

from __future__ import annotations

from autotune.space import rules_batch, rules_knobs, rules_offload, rules_precision, rules_zero
from autotune.space.rule import Rule

RULES: tuple[Rule, ...] = (
    *rules_batch.RULES,
    *rules_precision.RULES,
    *rules_offload.RULES,
    *rules_zero.RULES,
    *rules_knobs.RULES,
)

BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
