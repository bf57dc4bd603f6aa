"""Rules about the optimizer and scheduler sections, and about what some devices have no kernels for."""

from __future__ import annotations

from autotune.space.rule import ZERO, Kind, Rule, Situation
from autotune.space.schema import OPTIMIZERS, TORCH_OPTIMIZERS, ZERO_OPTIMIZERS

_TYPE = "optimizer.type"
_QUANTIZED = (ZERO + "zero_quantized_weights", ZERO + "zero_quantized_nontrainable_weights")


def _unknown(situation: Situation) -> bool:
    return situation.optimizer not in OPTIMIZERS and situation.get(_TYPE) not in TORCH_OPTIMIZERS


def _untested(situation: Situation) -> bool:
    return (
        situation.stage > 0
        and not _unknown(situation)
        and situation.optimizer not in ZERO_OPTIMIZERS
        and not situation.get("zero_allow_untested_optimizer", False)
    )


def _without_kernel(situation: Situation) -> bool:
    offloaded = situation.offload("optimizer") != "none"
    return situation.accelerator == "cpu" and (
        situation.optimizer == "lamb" or (situation.optimizer == "lion" and not offloaded)
    )


RULES = (
    Rule(
        id="optimizer_unknown",
        kind=Kind.REFUSE,
        keys=(_TYPE,),
        when=_unknown,
        sentence="DeepSpeed has no optimizer of this name, and torch.optim has none spelt so.",
        remedy="AdamW, or another of torch.optim with its capital letters",
        source="runtime/engine.py: _is_supported_optimizer",
    ),
    Rule(
        id="optimizer_untested",
        kind=Kind.REFUSE,
        keys=(_TYPE,),
        knobs=("zero_stage",),
        when=_untested,
        sentence="ZeRO takes Adam, AdamW, Adagrad, Lion and Muon, and others only where it is told to.",
        remedy="add zero_allow_untested_optimizer: true, or set zero_optimization.stage to 0",
        source="runtime/engine.py: _do_optimizer_sanity_check; runtime/zero/utils.py: ZERO_SUPPORTED_OPTIMIZERS",
    ),
    Rule(
        id="optimizer_cpu",
        kind=Kind.REFUSE,
        keys=(_TYPE,),
        knobs=("offload_optimizer",),
        when=_without_kernel,
        sentence="Lamb, and Lion where it is not offloaded, are for CUDA devices.",
        remedy="use AdamW on this machine",
        source="op_builder/cpu/no_impl.py: NotImplementedBuilder.load",
    ),
    Rule(
        id="max_grad_norm",
        kind=Kind.REFUSE,
        keys=("optimizer.params.max_grad_norm",),
        sentence="DeepSpeed clips gradients itself and refuses max_grad_norm.",
        remedy="write gradient_clipping",
        source="runtime/engine.py: _configure_basic_optimizer",
    ),
    Rule(
        id="lamb_loss_scale",
        kind=Kind.REFUSE,
        keys=(_TYPE,),
        when=lambda s: s.optimizer == "lamb" and s.get("fp16.loss_scale", 0) != 0,
        sentence="Lamb needs dynamic loss scaling.",
        remedy="take fp16.loss_scale out",
        source="runtime/engine.py: _do_sanity_check",
    ),
    Rule(
        id="muon_reduce_scatter",
        kind=Kind.REFUSE,
        keys=(_TYPE,),
        knobs=("zero_stage",),
        when=lambda s: s.optimizer == "muon" and s.stage == 3 and s.get(ZERO + "reduce_scatter", True) is True,
        sentence="Muon at stage 3 does not go with reduce-scatter.",
        remedy="set zero_optimization.reduce_scatter to false",
        source="runtime/zero/stage3.py: DeepSpeedZeroOptimizer_Stage3.__init__",
    ),
    Rule(
        id="quantized_cpu",
        kind=Kind.REFUSE,
        keys=_QUANTIZED,
        where=lambda s: [
            key for key in _QUANTIZED if s.stage == 3 and s.accelerator == "cpu" and s.get(key, False) is True
        ],
        sentence="Quantized weights are for CUDA devices.",
        remedy="take the key out on this machine",
        source="runtime/zero/partition_parameters.py: CUDAQuantizer",
    ),
    Rule(
        id="quantized_below_stage3",
        kind=Kind.IGNORE,
        keys=(*_QUANTIZED, ZERO + "zero_quantized_gradients"),
        when=lambda s: s.stage < 3,
        sentence="Quantized communication exists at stage 3 only.",
        remedy="take the key out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="quantized_reduce_scatter",
        kind=Kind.REFUSE,
        keys=(ZERO + "zero_quantized_gradients",),
        when=lambda s: (
            s.stage == 3
            and s.get(ZERO + "zero_quantized_gradients", False) is True
            and s.get(ZERO + "reduce_scatter", True) is False
        ),
        sentence="Quantized gradients need reduce-scatter.",
        remedy="set zero_optimization.reduce_scatter to true",
        source="runtime/zero/stage3.py: DeepSpeedZeroOptimizer_Stage3.__init__",
    ),
    Rule(
        id="autotp_divides",
        kind=Kind.REFUSE,
        keys=("tensor_parallel.autotp_size",),
        when=lambda s: s.world_size % max(int(s.get("tensor_parallel.autotp_size", 1)), 1) != 0,
        sentence="tensor_parallel.autotp_size must divide the number of devices.",
        remedy="write a divisor of the devices of one node",
        source="utils/groups.py: _init_tp_mesh_device",
    ),
)
