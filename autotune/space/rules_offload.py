"""Rules about offloading optimizer states and parameters."""

from __future__ import annotations

from autotune.space.rule import ZERO, Kind, Rule

_OPTIMIZER = ZERO + "offload_optimizer.device"
_PARAM = ZERO + "offload_param.device"

RULES = (
    Rule(
        id="offload_param_below_stage3",
        kind=Kind.IGNORE,
        keys=(_PARAM,),
        knobs=("zero_stage",),
        when=lambda s: s.stage < 3 and s.offload("param") != "none",
        sentence="Parameters are offloaded at stage 3 only; below it they stay on the device, without a word.",
        remedy="take offload_param out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="offload_optimizer_stage0",
        kind=Kind.REFUSE,
        keys=(_OPTIMIZER,),
        knobs=("zero_stage", "offload_optimizer"),
        when=lambda s: s.stage == 0 and s.offload("optimizer") != "none",
        sentence="Optimizer states are offloaded from stage 1 on; at stage 0 the CPU optimizer is given parameters "
        "that stay on the device, and its first step fails.",
        remedy="set zero_optimization.stage to 1, 2 or 3",
        source="runtime/engine.py: get_optimizer_configuration; ops/adam/cpu_adam.py: step",
    ),
    Rule(
        id="nvme_below_stage3",
        kind=Kind.CHANGE,
        keys=(_OPTIMIZER,),
        knobs=("zero_stage", "offload_optimizer"),
        when=lambda s: s.stage in (1, 2) and s.offload("optimizer") == "nvme",
        becomes=lambda s: "cpu",
        sentence="Stages 1 and 2 keep optimizer states in host memory where nvme is asked for.",
        remedy="write cpu, or set zero_optimization.stage to 3",
        source="runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__",
    ),
)
