"""Rules about offloading optimizer states and parameters."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.space.rule import ZERO, Kind, Rule, Situation

_OPTIMIZER = ZERO + "offload_optimizer"
_PARAM = ZERO + "offload_param"
_SUPER = _OPTIMIZER + ".super_offload"
_ZENFLOW = ZERO + "zenflow"
_NVME_KEYS = {
    _OPTIMIZER: ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
    _PARAM: ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}


def _without_device(situation: Situation) -> list[str]:
    return [
        name
        for name in (_OPTIMIZER, _PARAM)
        if isinstance(situation.written(name), dict) and not situation.has(name + ".device")
    ]


def _for_nvme(situation: Situation) -> Iterator[str]:
    for section, names in _NVME_KEYS.items():
        if situation.written(section + ".device") == "cpu":
            yield from (f"{section}.{name}" for name in names if situation.get(f"{section}.{name}"))


def _without_path(situation: Situation) -> list[str]:
    return [
        name + ".nvme_path"
        for name in (_OPTIMIZER, _PARAM)
        if situation.stage == 3
        and situation.get(name + ".device") == "nvme"
        and situation.get(name + ".nvme_path") is None
    ]


RULES = (
    Rule(
        id="offload_param_below_stage3",
        kind=Kind.IGNORE,
        keys=(_PARAM + ".device",),
        knobs=("zero_stage",),
        when=lambda s: s.stage < 3 and s.offload("param") != "none",
        sentence="Parameters are offloaded at stage 3 only; below it they stay on the device, without a word.",
        remedy="take offload_param out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="offload_without_device",
        kind=Kind.IGNORE,
        keys=(_OPTIMIZER, _PARAM),
        where=_without_device,
        sentence="An offload section that names no device offloads nothing.",
        remedy='add "device": "cpu"',
        source="runtime/zero/offload_config.py: DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig",
    ),
    Rule(
        id="offload_nvme_keys",
        kind=Kind.IGNORE,
        keys=(),
        where=_for_nvme,
        sentence="This key is read where the device is nvme.",
        remedy="take the key out, or set the device to nvme",
        source="runtime/zero/stage3.py: _configure_offloading, _configure_tensor_swapping",
    ),
    Rule(
        id="offload_optimizer_stage0",
        kind=Kind.REFUSE,
        keys=(_OPTIMIZER + ".device",),
        knobs=("zero_stage", "offload_optimizer"),
        when=lambda s: s.stage == 0 and s.offload("optimizer") != "none",
        sentence="Without ZeRO, DeepSpeed's CPU optimizer is given parameters that stay on the device, and the first "
        "step fails.",
        remedy="set zero_optimization.stage to 1, 2 or 3",
        source="runtime/engine.py: get_optimizer_configuration; ops/adam/cpu_adam.py: step",
    ),
    Rule(
        id="nvme_below_stage3",
        kind=Kind.CHANGE,
        keys=(_OPTIMIZER + ".device",),
        knobs=("zero_stage",),
        when=lambda s: s.stage in (1, 2) and s.offload("optimizer") == "nvme",
        becomes=lambda s: "cpu",
        sentence="Stages 1 and 2 keep optimizer states in host memory where nvme is asked for.",
        remedy="write cpu, or set zero_optimization.stage to 3",
        source="runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__",
    ),
    Rule(
        id="nvme_path",
        kind=Kind.REFUSE,
        keys=(_OPTIMIZER + ".nvme_path", _PARAM + ".nvme_path"),
        where=_without_path,
        sentence="Offloading to nvme needs the folder on the drive.",
        remedy="write nvme_path",
        source="runtime/zero/stage3.py: _configure_tensor_swapping; partition_parameters.py: _validate_remote_device",
    ),
    Rule(
        id="offload_ratio",
        kind=Kind.REFUSE,
        keys=(_OPTIMIZER + ".ratio",),
        when=lambda s: s.stage != 3 and float(s.get(_OPTIMIZER + ".ratio", 1.0)) < 1.0,
        sentence="Only stage 3 offloads a part of the optimizer.",
        remedy="take ratio out, or set zero_optimization.stage to 3",
        source="runtime/zero/config.py: offload_ratio_check",
    ),
    Rule(
        id="offload_torch_adam",
        kind=Kind.CHANGE,
        keys=("optimizer.params.torch_adam",),
        when=lambda s: (
            s.stage > 0
            and s.offload("optimizer") != "none"
            and s.optimizer in ("adam", "adamw")
            and s.get("optimizer.params.torch_adam", False) is True
        ),
        sentence="torch_adam puts torch's Adam on the processor, in the place of DeepSpeed's much faster CPU Adam.",
        remedy="take torch_adam out",
        source="runtime/engine.py: get_optimizer_configuration",
    ),
    Rule(
        id="super_offload_below_stage3",
        kind=Kind.IGNORE,
        keys=(_SUPER,),
        when=lambda s: s.stage < 3 and s.get(_SUPER, False) is True,
        sentence="SuperOffload exists at stage 3 only.",
        remedy="take the key out, or set zero_optimization.stage to 3",
        source="runtime/engine.py: _configure_zero_optimizer",
    ),
    Rule(
        id="super_offload_cpu",
        kind=Kind.REFUSE,
        keys=(_SUPER,),
        when=lambda s: s.stage == 3 and s.accelerator == "cpu" and s.get(_SUPER, False) is True,
        sentence="SuperOffload is for NVIDIA devices.",
        remedy="take the key out on this machine",
        source="runtime/superoffload/superoffload_stage3.py: SuperOffloadOptimizer_Stage3.__init__",
    ),
    Rule(
        id="gds_cpu",
        kind=Kind.REFUSE,
        keys=("aio.use_gds",),
        when=lambda s: s.accelerator == "cpu" and s.get("aio.use_gds", False) is True,
        sentence="GPUDirect Storage is for CUDA devices.",
        remedy="take the key out on this machine",
        source="runtime/swap_tensor/aio_config.py: get_aio_config",
    ),
    Rule(
        id="zenflow_offload",
        kind=Kind.REFUSE,
        keys=(_ZENFLOW,),
        when=lambda s: s.stage in (1, 2) and isinstance(s.written(_ZENFLOW), dict) and s.offload("optimizer") == "none",
        sentence="ZenFlow is a way to offload the optimizer, and offload_optimizer does not do so.",
        remedy="add offload_optimizer with device cpu",
        source="runtime/zenflow/zenflow_stage_1_and_2.py: ZenFlowZeroOptimizer.__init__",
    ),
    Rule(
        id="zenflow_accumulation",
        kind=Kind.CHANGE,
        keys=("gradient_accumulation_steps",),
        when=lambda s: (
            s.stage in (1, 2)
            and isinstance(s.written(_ZENFLOW), dict)
            and s.offload("optimizer") != "none"
            and s.get("gradient_accumulation_steps") != s.get(_ZENFLOW + ".update_interval", 0)
        ),
        becomes=lambda s: s.get(_ZENFLOW + ".update_interval", 0),
        sentence="ZenFlow sets gradient accumulation to its update_interval (0 where that is automatic).",
        remedy="write the same number for both",
        source="runtime/zenflow/engine.py: configure_zenflow",
    ),
)
