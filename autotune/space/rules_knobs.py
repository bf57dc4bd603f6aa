"""Rules about our own knobs and about the allocator, for which DeepSpeed's config has no key."""

from __future__ import annotations

from autotune.space.rule import Kind, Rule, Situation


def _nothing_checkpointed(situation: Situation) -> bool:
    return str(situation.get("checkpoint_blocks", "none")) == "none"


RULES = (
    Rule(
        id="checkpoint_nothing",
        kind=Kind.IGNORE,
        keys=("checkpoint_part", "checkpoint_input"),
        knobs=("checkpoint_blocks",),
        when=_nothing_checkpointed,
        sentence="Which part of a block is recomputed, and where its input waits, means nothing where no block is.",
        remedy="set checkpoint_blocks to quarter, half or all",
        source="autotune",
    ),
    Rule(
        id="allocator_cpu",
        kind=Kind.IGNORE,
        keys=("expandable_segments", "garbage_collection_threshold"),
        when=lambda s: s.accelerator != "cuda",
        sentence="The allocator's settings are those of CUDA devices; processors have no caching allocator.",
        remedy="leave the allocator's knobs out on this machine",
        source="autotune",
    ),
)
