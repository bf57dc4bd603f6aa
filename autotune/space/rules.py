"""All rules, in the order in which they are tried."""

from __future__ import annotations

from autotune.space import (
    rules_batch,
    rules_checkpointing,
    rules_offload,
    rules_optimizer,
    rules_precision,
    rules_syntax,
    rules_zero,
)
from autotune.space.rule import Rule

RULES: tuple[Rule, ...] = (
    *rules_batch.RULES,
    *rules_syntax.RULES,
    *rules_precision.RULES,
    *rules_optimizer.RULES,
    *rules_offload.RULES,
    *rules_zero.RULES,
    *rules_checkpointing.RULES,
)

BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
