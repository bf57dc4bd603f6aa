"""Rules about number formats and the optimizer."""

from __future__ import annotations

from autotune.space.rule import Kind, Rule

RULES = (
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
        id="grad_accum_stage0",
        kind=Kind.REFUSE,
        keys=("data_types.grad_accum_dtype",),
        knobs=("precision", "zero_stage"),
        when=lambda s: s.stage == 0 and s.gradients != s.precision,
        sentence="Without ZeRO, gradients are accumulated in the model's own type.",
        remedy="take data_types.grad_accum_dtype out, or set zero_optimization.stage to 1 or more",
        source="runtime/engine.py: _do_optimizer_sanity_check",
    ),
)
