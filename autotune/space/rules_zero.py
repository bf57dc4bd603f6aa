"""Rules about ZeRO itself: which keys a stage reads, what it refuses, what it changes."""

from __future__ import annotations

from autotune.space.rule import ZERO, Kind, Rule, Situation

_STAGE3_KEYS = tuple(
    ZERO + name
    for name in (
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save",
        "sub_group_size",
    )
)
_STAGE12_KEYS = tuple(
    ZERO + name
    for name in (
        "use_multi_rank_bucket_allreduce",
        "round_robin_gradients",
        "ignore_unused_parameters",
        "parameter_alignment",
        "elastic_checkpoint",
    )
)
_GRADIENT_KEYS = tuple(
    ZERO + name for name in ("overlap_comm", "reduce_bucket_size", "contiguous_gradients", "reduce_scatter")
)
_HPZ = ZERO + "zero_hpz_partition_size"
_ALLGATHER = ZERO + "allgather_bucket_size"
_CONTIGUOUS = ZERO + "contiguous_gradients"
_PREFETCH = ZERO + "stage3_prefetch_bucket_size"
_SEQUENTIAL = ZERO + "stage3_allgather_sequential"


def _hpz(situation: Situation) -> int:
    size = situation.get(_HPZ, 1)
    return size if isinstance(size, int) else 1


def _odd(situation: Situation) -> bool:
    size = situation.get(_ALLGATHER, 0)
    return (
        situation.stage in (1, 2) and not situation.bf16_optimizer and isinstance(size, int | float) and size % 2 == 1
    )


def _scaled(situation: Situation) -> list[str]:
    if situation.stage < 2 or situation.get(ZERO + "reduce_scatter", True) is not True:
        return []
    prescaled = situation.get("prescale_gradients", False) is True
    return ["prescale_gradients"] * prescaled + ["gradient_predivide_factor"] * (
        situation.get("gradient_predivide_factor", 1.0) != 1.0
    )


def _without_norm(situation: Situation) -> bool:
    clipping = situation.get("gradient_clipping", 1.0)
    return situation.get(ZERO + "compute_grad_norm", True) is False and (
        situation.stage not in (1, 2)
        or (isinstance(clipping, int | float) and clipping > 0)
        or situation.offload("optimizer") != "none"
        or bool(situation.written(ZERO + "zenflow"))
        or situation.bf16_optimizer
    )


RULES = (
    Rule(
        id="stage3_keys",
        kind=Kind.IGNORE,
        keys=_STAGE3_KEYS,
        knobs=("zero_stage",),
        when=lambda s: s.stage < 3,
        sentence="Fetching of parameters is set for stage 3 only: below it they are whole on every device.",
        remedy="take the key out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="hpz_below_stage3",
        kind=Kind.IGNORE,
        keys=(_HPZ,),
        knobs=("zero_stage",),
        when=lambda s: s.stage < 3,
        sentence="A second partition of the parameters (hpZ) exists at stage 3 only.",
        remedy="take the key out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="hpz_divides",
        kind=Kind.REFUSE,
        keys=(_HPZ,),
        knobs=("zero_stage", "zero_hpz_partition_size"),
        when=lambda s: s.stage == 3 and s.world_size % min(max(_hpz(s), 1), s.world_size) != 0,
        sentence="zero_hpz_partition_size must divide the number of devices.",
        remedy="write the devices of one node",
        source="utils/groups.py: _create_zero_param_parallel_group",
    ),
    Rule(
        id="hpz_above_world",
        kind=Kind.CHANGE,
        keys=(_HPZ,),
        knobs=("zero_stage",),
        when=lambda s: s.stage == 3 and _hpz(s) > s.world_size,
        becomes=lambda s: s.world_size,
        sentence="A second partition over more devices than there are is one over all devices.",
        remedy="write the devices of one node",
        source="utils/groups.py: _create_zero_param_parallel_group",
    ),
    Rule(
        id="allgather_bucket",
        kind=Kind.IGNORE,
        keys=(_ALLGATHER,),
        knobs=("zero_stage",),
        when=lambda s: s.stage not in (1, 2),
        sentence="Updated parameters are gathered in buckets at stages 1 and 2 only.",
        remedy="take the key out",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="allgather_odd",
        kind=Kind.REFUSE,
        keys=(_ALLGATHER,),
        knobs=("precision", "zero_stage", "offload_optimizer", "allgather_bucket_size"),
        when=_odd,
        sentence="Stages 1 and 2 need an even allgather_bucket_size.",
        remedy="add one to it",
        source="runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__",
    ),
    Rule(
        id="allgather_partitions",
        kind=Kind.IGNORE,
        keys=(ZERO + "allgather_partitions",),
        sentence="Nothing in DeepSpeed reads allgather_partitions any more.",
        remedy="take the key out",
        source="runtime/engine.py: zero_allgather_partitions (never called)",
    ),
    Rule(
        id="stage0_keys",
        kind=Kind.IGNORE,
        keys=_GRADIENT_KEYS,
        knobs=("zero_stage",),
        when=lambda s: s.stage == 0,
        sentence="Without ZeRO, gradients are reduced after backward in buckets of DeepSpeed's own size.",
        remedy="take the key out, or set zero_optimization.stage to 1 or more",
        source="runtime/engine.py: allreduce_gradients",
    ),
    Rule(
        id="stage12_keys",
        kind=Kind.IGNORE,
        keys=_STAGE12_KEYS,
        when=lambda s: s.stage in (0, 3),
        sentence="Only stages 1 and 2 read this key.",
        remedy="take the key out",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="bf16_optimizer_keys",
        kind=Kind.IGNORE,
        keys=_GRADIENT_KEYS + _STAGE12_KEYS,
        knobs=("precision", "zero_stage", "offload_optimizer"),
        when=lambda s: s.bf16_optimizer,
        sentence="At stage 1 in bf16 with gradients accumulated in fp32, DeepSpeed uses its BF16_Optimizer, which does "
        "not read this key.",
        remedy="take the key out, or set zero_optimization.stage to 2",
        source="runtime/engine.py: _do_optimizer_sanity_check, _configure_bf16_optimizer",
    ),
    Rule(
        id="overlap_cpu",
        kind=Kind.IGNORE,
        keys=(ZERO + "overlap_comm",),
        knobs=("zero_stage",),
        when=lambda s: s.stage == 3 and s.accelerator == "cpu",
        sentence="Stage 3 overlaps communication by streams, and processors have none.",
        remedy="take the key out on this machine",
        source="runtime/zero/stage3.py: DeepSpeedZeroOptimizer_Stage3.__init__",
    ),
    Rule(
        id="contiguous_forced",
        kind=Kind.CHANGE,
        keys=(_CONTIGUOUS,),
        when=lambda s: s.stage in (1, 2) and s.offload("optimizer") != "none" and s.get(_CONTIGUOUS, True) is False,
        becomes=lambda s: True,
        sentence="With an offloaded optimizer, stages 1 and 2 always keep gradients contiguous.",
        remedy="write true",
        source="runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__",
    ),
    Rule(
        id="allgather_sequential",
        kind=Kind.CHANGE,
        keys=(_PREFETCH,),
        when=lambda s: s.stage == 3 and s.get(_SEQUENTIAL, False) is True and s.get(_PREFETCH) != 1,
        becomes=lambda s: 1,
        sentence="Gathering parameters one by one sets the prefetch bucket to one element.",
        remedy="take one of the two keys out",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="legacy_stage1",
        kind=Kind.REFUSE,
        keys=(ZERO + "legacy_stage1",),
        when=lambda s: s.stage > 0 and s.get(ZERO + "legacy_stage1", False) is True,
        sentence="The old implementation of stage 1 is gone.",
        remedy="take the key out",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="reduce_scatter_scaled",
        kind=Kind.REFUSE,
        keys=("prescale_gradients", "gradient_predivide_factor"),
        where=_scaled,
        sentence="Stages 2 and 3 cannot scale gradients beforehand where they use reduce-scatter.",
        remedy="take the key out, or set zero_optimization.reduce_scatter to false",
        source="runtime/zero/stage_1_and_2.py, stage3.py: __init__",
    ),
    Rule(
        id="managed_overlap",
        kind=Kind.REFUSE,
        keys=("managed_gradient_accumulation",),
        when=lambda s: (
            s.get("managed_gradient_accumulation", True) is False
            and s.stage < 2
            and s.get(ZERO + "overlap_comm", False) is True
        ),
        sentence="Below stage 2, overlap_comm needs DeepSpeed to manage gradient accumulation.",
        remedy="set zero_optimization.overlap_comm to false",
        source="runtime/engine.py: _do_sanity_check",
    ),
    Rule(
        id="grad_norm",
        kind=Kind.REFUSE,
        keys=(ZERO + "compute_grad_norm",),
        when=_without_norm,
        sentence="The gradient norm can be left out at stages 1 and 2 only, without clipping (1.0 where nothing is "
        "written), offloading or fp32 accumulation in bf16.",
        remedy="take the key out, or set gradient_clipping to 0",
        source="runtime/zero/config.py: compute_grad_norm_valid; runtime/zero/stage_1_and_2.py: __init__",
        versions=">=0.19.8",
    ),
    Rule(
        id="allreduce_op",
        kind=Kind.REFUSE,
        keys=("gradient_allreduce_op",),
        when=lambda s: str(s.get("gradient_allreduce_op", "mean")).lower() not in ("mean", "sum"),
        sentence="Gradients are reduced by mean or by sum.",
        remedy="write one of them",
        source="runtime/config.py: get_gradient_allreduce_op",
    ),
    Rule(
        id="allreduce_sum",
        kind=Kind.REFUSE,
        keys=("gradient_allreduce_op",),
        when=lambda s: str(s.get("gradient_allreduce_op", "mean")).lower() == "sum" and s.stage == 3,
        sentence="Stage 3 reduces gradients by mean only.",
        remedy="write mean, or set zero_optimization.stage to 2 or less",
        source="runtime/config.py: _do_error_check",
    ),
)
