"""Rules about ZeRO itself: which keys a stage reads, and what it refuses."""

from __future__ import annotations

from autotune.space.rule import ZERO, Kind, Rule, Situation

STAGE3_KEYS = tuple(
    ZERO + name
    for name in (
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    )
)


def _odd(situation: Situation) -> bool:
    size = situation.get(ZERO + "allgather_bucket_size", 0)
    return situation.stage in (1, 2) and isinstance(size, int) and size % 2 == 1


RULES = (
    Rule(
        id="stage3_keys",
        kind=Kind.IGNORE,
        keys=STAGE3_KEYS,
        knobs=("zero_stage",),
        when=lambda s: s.stage < 3,
        sentence="Sizes of parameter fetching are read at stage 3 only: below it parameters are whole on every device.",
        remedy="take the key out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="hpz_below_stage3",
        kind=Kind.IGNORE,
        keys=(ZERO + "zero_hpz_partition_size",),
        knobs=("zero_stage",),
        when=lambda s: s.stage < 3,
        sentence="A second partition of the parameters (hpZ) exists at stage 3 only.",
        remedy="take the key out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="allgather_bucket",
        kind=Kind.IGNORE,
        keys=(ZERO + "allgather_bucket_size",),
        knobs=("zero_stage",),
        when=lambda s: s.stage not in (1, 2),
        sentence="Updated parameters are gathered in buckets at stages 1 and 2 only.",
        remedy="take the key out",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="stage0_keys",
        kind=Kind.IGNORE,
        keys=(ZERO + "overlap_comm", ZERO + "reduce_bucket_size"),
        knobs=("zero_stage",),
        when=lambda s: s.stage == 0,
        sentence="Without ZeRO, gradients are reduced after backward in buckets of DeepSpeed's own size.",
        remedy="take the key out, or set zero_optimization.stage to 1 or more",
        source="runtime/engine.py: allreduce_gradients",
    ),
    Rule(
        id="allgather_odd",
        kind=Kind.REFUSE,
        keys=(ZERO + "allgather_bucket_size",),
        knobs=("zero_stage", "allgather_bucket_size"),
        when=_odd,
        sentence="Stages 1 and 2 need an even allgather_bucket_size.",
        remedy="add one to it",
        source="runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__",
    ),
)
