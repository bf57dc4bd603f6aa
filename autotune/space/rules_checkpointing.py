"""Rules about activation checkpointing and about the allocator."""

from __future__ import annotations

from autotune.space.rule import Kind, Rule, Situation

_SECTION = "activation_checkpointing"
_CONTIGUOUS = _SECTION + ".contiguous_memory_optimization"


def _nothing_checkpointed(situation: Situation) -> bool:
    return str(situation.get("checkpoint_blocks", "none")) == "none"


RULES = (
    Rule(
        id="checkpointing_section",
        kind=Kind.IGNORE,
        keys=(_SECTION,),
        when=lambda s: not s.own_model,
        sentence="This section does nothing: only models that call deepspeed.checkpointing.configure read it.",
        remedy="take the section out; checkpoint the model's blocks in code, as autotune's recipe says",
        source="runtime/activation_checkpointing/checkpointing.py: _configure_using_config_file",
    ),
    Rule(
        id="contiguous_partition",
        kind=Kind.REFUSE,
        keys=(_CONTIGUOUS,),
        when=lambda s: bool(s.get(_CONTIGUOUS, False)) and not s.get(_SECTION + ".partition_activations", False),
        sentence="A model that reads the section is refused contiguous memory without partition_activations.",
        remedy="set partition_activations to true, or take contiguous_memory_optimization out",
        source="runtime/activation_checkpointing/checkpointing.py: configure",
    ),
    Rule(
        id="contiguous_number",
        kind=Kind.REFUSE,
        keys=(_CONTIGUOUS,),
        when=lambda s: bool(s.get(_CONTIGUOUS, False)) and s.get(_SECTION + ".number_checkpoints") is None,
        sentence="A model that reads the section is refused contiguous memory without number_checkpoints.",
        remedy="write number_checkpoints, or take contiguous_memory_optimization out",
        source="runtime/activation_checkpointing/checkpointing.py: configure",
    ),
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
    Rule(
        id="garbage_expandable",
        kind=Kind.IGNORE,
        keys=("garbage_collection_threshold",),
        knobs=("expandable_segments",),
        when=lambda s: s.get("expandable_segments", False) is True,
        sentence="Blocks of expandable segments are never collected.",
        remedy="set expandable_segments to false, or leave the threshold out",
        source="autotune (torch: c10/cuda/CUDACachingAllocator.cpp, garbage_collect_cached_blocks)",
    ),
)
