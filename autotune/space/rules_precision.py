"""Rules about number formats."""

from __future__ import annotations

from autotune.space.rule import ZERO, Kind, Rule, Situation, dtype

_MASTER = ("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
_DTYPES = ("data_types.grad_accum_dtype", "data_types.param_dtype")


def _unknown_dtypes(situation: Situation) -> list[str]:
    known = ("fp32", "fp16", "bf16", "int8")
    return [key for key in _DTYPES if situation.get(key) is not None and dtype(situation.get(key)) not in known]


def _other_param_dtype(situation: Situation) -> bool:
    written = situation.get("data_types.param_dtype")
    return written is not None and not _unknown_dtypes(situation) and dtype(written) != situation.precision


def _bad_loss_scale(situation: Situation) -> list[str]:
    scale = situation.get("fp16.loss_scale", 0)
    if isinstance(scale, int | float) and scale < 0:
        return ["fp16.loss_scale"]
    names = ("fp16.loss_scale_window", "fp16.min_loss_scale")
    dynamic = situation.get("fp16.enabled", False) is True and scale == 0
    return [name for name in names if dynamic and isinstance(n := situation.get(name, 1), int | float) and n <= 0]


def _unoffloaded_master(situation: Situation) -> list[str]:
    if situation.stage == 0 or situation.offload("optimizer") != "none":
        return []
    states = situation.get("bf16.bf16_optimizer_states", False)
    return [name for name in _MASTER if situation.get(name, False) is True and not (states and name == _MASTER[0])]


RULES = (
    Rule(
        id="fp16_and_bf16",
        kind=Kind.REFUSE,
        keys=("fp16.enabled",),
        when=lambda s: s.get("fp16.enabled") is True and s.precision == "bf16",
        sentence="fp16 and bf16 cannot both be on.",
        remedy="keep one of the two",
        source="runtime/config.py: DeepSpeedConfig._initialize_params",
    ),
    Rule(
        id="fp16_cpu",
        kind=Kind.REFUSE,
        keys=("fp16.enabled",),
        knobs=("precision",),
        when=lambda s: s.accelerator == "cpu" and s.precision == "fp16",
        sentence="Processors do not train in fp16 (DeepSpeed allows it on a few with AVX512-FP16; autotune does not).",
        remedy="use bf16",
        source="runtime/engine.py: _do_sanity_check; accelerator/cpu_accelerator.py: is_fp16_supported",
    ),
    Rule(
        id="dtype_unknown",
        kind=Kind.REFUSE,
        keys=_DTYPES,
        where=_unknown_dtypes,
        sentence="DeepSpeed knows the types fp32, fp16 and bf16.",
        remedy="write one of them",
        source="runtime/config.py: DtypeEnum; runtime/engine.py: get_data_types",
    ),
    Rule(
        id="param_dtype",
        kind=Kind.REFUSE,
        keys=("data_types.param_dtype",),
        when=_other_param_dtype,
        sentence="The parameters' type must be the one that bf16 or fp16 switches on.",
        remedy="take data_types.param_dtype out",
        source="runtime/engine.py: _assert_valid_mixed_precision_config",
    ),
    Rule(
        id="grad_accum_stage0",
        kind=Kind.REFUSE,
        keys=("data_types.grad_accum_dtype",),
        knobs=("precision", "zero_stage"),
        when=lambda s: s.stage == 0 and not _unknown_dtypes(s) and s.gradients != s.precision,
        sentence="Without ZeRO, gradients are accumulated in the model's own type.",
        remedy="take data_types.grad_accum_dtype out, or set zero_optimization.stage to 1 or more",
        source="runtime/engine.py: _do_optimizer_sanity_check",
    ),
    Rule(
        id="communication_dtype",
        kind=Kind.REFUSE,
        keys=("communication_data_type",),
        when=lambda s: str(s.get("communication_data_type", "fp32")).lower() not in ("fp32", "fp16", "bf16"),
        sentence="Gradients travel as fp32, fp16 or bf16, written so.",
        remedy="write one of them, or take the key out for the model's own type",
        source="runtime/config.py: get_communication_data_type",
    ),
    Rule(
        id="loss_scale",
        kind=Kind.REFUSE,
        keys=("fp16.loss_scale", "fp16.loss_scale_window", "fp16.min_loss_scale"),
        where=_bad_loss_scale,
        sentence="Loss scaling needs numbers above 0; a loss_scale of 0 means dynamic.",
        remedy="take the key out for DeepSpeed's default",
        source="runtime/precision_config.py: DeepSpeedFP16Config",
    ),
    Rule(
        id="master_stage0",
        kind=Kind.REFUSE,
        keys=_MASTER,
        where=lambda s: [name for name in _MASTER if s.stage == 0 and s.get(name, False) is True],
        sentence="Master weights in half precision need ZeRO.",
        remedy="set zero_optimization.stage to 1 or more",
        source="runtime/config.py: _do_error_check",
    ),
    Rule(
        id="master_offload",
        kind=Kind.REFUSE,
        keys=_MASTER,
        where=_unoffloaded_master,
        sentence="Master weights in half precision need an offloaded optimizer, or bf16 optimizer states beside them.",
        remedy="add offload_optimizer, or set bf16.bf16_optimizer_states",
        source="runtime/base_optimizer.py: _configure_master_weights",
    ),
    Rule(
        id="bf16_states",
        kind=Kind.REFUSE,
        keys=("bf16.bf16_optimizer_states",),
        when=lambda s: (
            s.get("bf16.bf16_optimizer_states", False) is True
            and not (s.stage > 0 and s.get(_MASTER[0], False) is True)
        ),
        sentence="Optimizer states in bf16 need ZeRO and bf16_master_weights_and_grads.",
        remedy="set bf16.bf16_master_weights_and_grads, and zero_optimization.stage to 1 or more",
        source="runtime/config.py: _do_error_check",
    ),
    Rule(
        id="bf16_overflow",
        kind=Kind.IGNORE,
        keys=("bf16.check_grad_overflow",),
        when=lambda s: s.stage == 0 or s.stage == 3 or s.bf16_optimizer,
        sentence="bf16 gradients are checked for overflow by the optimizer of stages 1 and 2 only.",
        remedy="take the key out",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="bf16_immediate",
        kind=Kind.IGNORE,
        keys=("bf16.immediate_grad_update",),
        when=lambda s: not s.bf16_optimizer,
        sentence="Gradients are updated at once only at stage 1 in bf16 with gradients accumulated in fp32.",
        remedy="take the key out",
        source="runtime/engine.py: _do_optimizer_sanity_check; runtime/bf16_optimizer.py",
    ),
    Rule(
        id="autocast_quantized",
        kind=Kind.REFUSE,
        keys=("torch_autocast.enabled",),
        when=lambda s: (
            s.get("torch_autocast.enabled", False) is True and s.get(ZERO + "zero_quantized_weights", False) is True
        ),
        sentence="torch_autocast and quantized weights exclude each other.",
        remedy="keep one of the two",
        source="runtime/torch_autocast.py: init_autocast_params",
    ),
)
