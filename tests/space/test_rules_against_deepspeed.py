"""Every rule, shown on the installed DeepSpeed: what it refuses, what it ignores, what it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from autotune.space import schema
from autotune.space.rule import Kind, Rule
from autotune.space.rules import BY_ID, RULES

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


CPU = {"device": "cpu", "pin_memory": False}
FP16 = {"bf16": ..., "fp16": {"enabled": True}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
CHECKPOINTING = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2}


@dataclass
class Refused:
    """DeepSpeed raises for `bad` and takes `good`; `by` is what is tried with a config."""

    bad: Mapping[str, Any]
    good: Mapping[str, Any]
    message: str
    by: Callable[[Any, Mapping[str, Any]], Any] = field(default=lambda engines, change: engines.run(change))


@dataclass
class Ignored:
    """Writing `keys` makes no difference in `config`; it does in `felt`, where there is such a config."""

    config: Mapping[str, Any]
    keys: Mapping[str, Any]
    felt: Mapping[str, Any] | None = None
    config_only: bool = False


@dataclass
class Changed:
    """What `effective` finds in the engine of `config` is `value`, not what is written."""

    config: Mapping[str, Any]
    effective: Callable[[Any], Any]
    value: Any


def read(engines: Any, change: Mapping[str, Any]) -> Any:
    return engines.config(change)


def configure_checkpointing(engines: Any, change: Mapping[str, Any]) -> None:
    """What a model does that uses DeepSpeed's activation checkpointing."""
    engines.deepspeed.checkpointing.configure(None, deepspeed_config=engines.full(change))


def step_on_device(engines: Any, change: Mapping[str, Any]) -> None:
    """Gives the optimizer that DeepSpeed built a parameter that is not in host memory, as an accelerator's is."""

    def step(engine: Any) -> None:
        parameter = engines.torch.nn.Parameter(engines.torch.empty(8, device="meta"))
        parameter.grad = engines.torch.empty(8, device="meta")
        zeroed = engine.zero_optimization()
        kind = type(engine.basic_optimizer)
        if not zeroed and kind.__name__ == "DeepSpeedCPUAdam":
            kind([parameter]).step()

    engines.run(change, step)


def partition_over_three(engines: Any, change: Mapping[str, Any]) -> None:
    """Makes the groups of hpZ as one of three ranks would."""
    groups = engines.deepspeed.utils.groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.dist, "get_world_size", lambda group=None: 3)
        patch.setattr(groups.dist, "new_group", lambda ranks: ranks)
        patch.setattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
        groups._create_zero_param_parallel_group(change["zero_optimization"]["zero_hpz_partition_size"])


def partition_size(engine: Any) -> int:
    from deepspeed.utils import groups

    return int(groups._get_zero_param_intra_parallel_group_world_size())


def without_avx512_fp16(engines: Any, change: Mapping[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        accelerator = type(engines.deepspeed.accelerator.get_accelerator())
        if "fp16" in change:
            patch.setattr(engines.torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False, raising=False)
            assert not accelerator().is_fp16_supported()
        engines.run(change)


EVIDENCE: dict[str, Refused | Ignored | Changed] = {
    # batch
    "batch_identity": Refused(
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        "train_batch_size is not equal",
        read,
    ),
    "batch_number": Refused(
        {"gradient_accumulation_steps": "auto"}, {"gradient_accumulation_steps": 2}, "not supported between", read
    ),
    "batch_missing": Refused(
        {"train_micro_batch_size_per_gpu": ...},
        {"train_micro_batch_size_per_gpu": ..., "train_batch_size": 4},
        "needs to be provided",
        read,
    ),
    # syntax
    "auto_dropped": Ignored({"bf16": ...}, {"fp16": {"enabled": "auto"}, **zero("auto")}, config_only=True),  # type: ignore[arg-type]
    "unknown_key": Ignored({}, {"zero_optimisation": {"stage": 3}, "data_types": {"grad_dtype": "fp32"}}),
    "unknown_section_key": Refused(zero(2, grad_hooks=True), zero(2), "Extra inputs are not permitted", read),
    "removed_key": Refused({"amp": {"enabled": False}}, {}, "removed", read),
    "auto_refused": Refused(optimizer("AdamW", weight_decay="auto"), optimizer("AdamW", weight_decay=0.1), ""),
    "size_number": Refused(
        zero(2, allgather_bucket_size=1.5e7 + 0.4), zero(2, allgather_bucket_size=1.5e7), "valid integer", read
    ),
    "stage_number": Refused(zero(4), zero(3), "should be 0, 1, 2, 3", read),
    "deprecated_offload": Refused(
        zero(2, cpu_offload=True, offload_optimizer=CPU), zero(2, offload_optimizer=CPU), "together", read
    ),
    # precision
    "fp16_and_bf16": Refused({"fp16": {"enabled": True}}, {}, "cannot be simultaneously enabled", read),
    "fp16_cpu": Refused(FP16, {}, "fp16 is not supported", without_avx512_fp16),
    "dtype_unknown": Refused(
        {**zero(2), "data_types": {"grad_accum_dtype": "fp8"}}, {**zero(2), **FP32_GRADIENTS}, "not a valid DtypeEnum"
    ),
    "param_dtype": Refused(
        {"data_types": {"param_dtype": "fp32"}}, {"data_types": {"param_dtype": "bf16"}}, "conflicts with"
    ),
    "grad_accum_stage0": Refused({**zero(0), **FP32_GRADIENTS}, {**zero(1), **FP32_GRADIENTS}, "unsupported mix"),
    "communication_dtype": Refused(
        {"communication_data_type": "bfloat16"}, {"communication_data_type": "BF16"}, "Invalid communication", read
    ),
    "loss_scale": Refused(
        {"bf16": ..., "fp16": {"enabled": True, "loss_scale_window": 0}},
        {"bf16": ..., "fp16": {"enabled": True, "loss_scale_window": 0, "loss_scale": 128}},
        "loss_scale_window must be > 0",
        read,
    ),
    "master_stage0": Refused(
        {"bf16": {"bf16_master_weights_and_grads": True}},
        {"bf16": {"bf16_master_weights_and_grads": True}, **zero(1)},
        "only supported with ZeRO",
        read,
    ),
    "master_offload": Refused(
        {"bf16": {"bf16_master_weights_and_grads": True}, **zero(2)},
        {"bf16": {"bf16_master_weights_and_grads": True}, **zero(2, offload_optimizer=CPU)},
        "requires ZeRO-2 Offload",
    ),
    "bf16_states": Refused(
        {"bf16": {"bf16_optimizer_states": True}, **zero(1)},
        {"bf16": {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}, **zero(1)},
        "requires bf16_master_weights_and_grads",
        read,
    ),
    "bf16_overflow": Ignored(zero(0), {"bf16": {"check_grad_overflow": False}}, felt=zero(2)),
    "bf16_immediate": Ignored(zero(1), {"bf16": {"immediate_grad_update": True}}, felt={**zero(1), **FP32_GRADIENTS}),
    "autocast_quantized": Refused(
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **zero(2, zero_quantized_weights=True)},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, **zero(2)},
        "torch autocast and zero quantized",
    ),
    # optimizer
    "optimizer_unknown": Refused(optimizer("sgd"), optimizer("SGD"), "not a supported DeepSpeed Optimizer"),
    "optimizer_untested": Refused(
        {**optimizer("SGD"), **zero(1)},
        {**optimizer("SGD"), **zero(1), "zero_allow_untested_optimizer": True},
        "untested ZeRO Optimizer",
    ),
    "optimizer_cpu": Refused(
        {**optimizer("Lion"), **zero(2)}, {**optimizer("AdamW"), **zero(2)}, "not been implemented on CPU"
    ),
    "max_grad_norm": Refused(optimizer("AdamW", max_grad_norm=1.0), optimizer("AdamW"), "'max_grad_norm' is not"),
    "lamb_loss_scale": Refused(
        {**optimizer("Lamb"), "fp16": {"loss_scale": 128}}, optimizer("AdamW"), "requires dynamic loss scaling"
    ),
    "muon_reduce_scatter": Refused(
        {**optimizer("Muon"), **zero(3)}, {**optimizer("Muon"), **zero(3, reduce_scatter=False)}, "Muon and reduce"
    ),
    "quantized_cpu": Refused(zero(3, zero_quantized_weights=True), zero(3), "not been implemented on CPU"),
    "quantized_below_stage3": Ignored(
        zero(2),
        zero(
            2,
            zero_quantized_gradients=True,
            zero_quantized_weights=True,
            zero_quantized_nontrainable_weights=True,
        ),
    ),
    "quantized_reduce_scatter": Refused(
        zero(3, zero_quantized_gradients=True, reduce_scatter=False),
        zero(3, zero_quantized_gradients=True),
        "reduce_scatter should also be enabled",
    ),
    "autotp_divides": Refused({"tensor_parallel": {"autotp_size": 2}}, {"tensor_parallel": {"autotp_size": 1}}, ""),
    # offload
    "offload_param_below_stage3": Ignored(zero(2), {"zero_optimization": {"offload_param": CPU}}, felt=zero(3)),
    "offload_without_device": Ignored(
        zero(3), {"zero_optimization": {"offload_optimizer": {}, "offload_param": {"pin_memory": True}}}
    ),
    "offload_nvme_keys": Ignored(
        zero(3, offload_optimizer=CPU, offload_param=CPU),
        {
            "zero_optimization": {
                "offload_optimizer": {
                    "nvme_path": "/nvme",
                    "buffer_count": 2,
                    "pipeline_read": True,
                    "pipeline_write": True,
                    "fast_init": True,
                },
                "offload_param": {"nvme_path": "/nvme", "buffer_count": 2, "buffer_size": 1, "max_in_cpu": 1},
            }
        },
    ),
    "offload_optimizer_stage0": Refused(
        zero(0, offload_optimizer=CPU), zero(1, offload_optimizer=CPU), "must be 'cpu'", step_on_device
    ),
    "nvme_below_stage3": Changed(
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"}),
        lambda engine: "cpu" if engine.optimizer.cpu_offload and not engine.zero_nvme_offload_optimizer() else "nvme",
        "cpu",
    ),
    "nvme_path": Refused(
        zero(3, offload_optimizer={"device": "nvme"}), zero(3, offload_optimizer={"device": "cpu"}), "NoneType"
    ),
    "offload_ratio": Refused(
        zero(2, offload_optimizer={**CPU, "ratio": 0.5}),
        zero(3, offload_optimizer={**CPU, "ratio": 0.5}),
        "only supported for ZeRO Stage 3",
        read,
    ),
    "offload_torch_adam": Changed(
        {**optimizer("AdamW", torch_adam=True), **zero(2, offload_optimizer=CPU)},
        lambda engine: type(engine.basic_optimizer).__module__.split(".")[0],
        "torch",
    ),
    "super_offload_below_stage3": Ignored(
        zero(2, offload_optimizer=CPU), {"zero_optimization": {"offload_optimizer": {"super_offload": True}}}
    ),
    "super_offload_cpu": Refused(
        zero(3, offload_optimizer={**CPU, "super_offload": True}),
        zero(3, offload_optimizer=CPU),
        "only supports NVIDIA",
    ),
    "gds_cpu": Refused({"aio": {"use_gds": True}}, {"aio": {"use_gds": False}}, "only supported for CUDA", read),
    "zenflow_offload": Refused(
        zero(2, zenflow={}), zero(2, zenflow={}, offload_optimizer=CPU), "must be used with cpu"
    ),
    "zenflow_accumulation": Changed(
        {
            "gradient_accumulation_steps": 2,
            **zero(
                2,
                offload_optimizer=CPU,
                zenflow={"select_strategy": "step", "select_interval": 4, "update_interval": 4},
            ),
        },
        lambda engine: engine.gradient_accumulation_steps(),
        4,
    ),
    # ZeRO
    "stage3_keys": Ignored(
        zero(2),
        {
            "zero_optimization": {
                "stage3_prefetch_bucket_size": 7,
                "stage3_param_persistence_threshold": 7,
                "stage3_model_persistence_threshold": 7,
                "stage3_max_live_parameters": 7,
                "stage3_max_reuse_distance": 7,
                "stage3_module_granularity_threshold": 7,
                "stage3_use_all_reduce_for_fetch_params": True,
                "stage3_allgather_sequential": True,
                "stage3_gather_16bit_weights_on_model_save": True,
                "sub_group_size": 7,
            }
        },
        felt=zero(3),
    ),
    "hpz_below_stage3": Ignored(zero(2), {"zero_optimization": {"zero_hpz_partition_size": 2}}, felt=zero(3)),
    "hpz_divides": Refused(
        zero(3, zero_hpz_partition_size=2),
        zero(3, zero_hpz_partition_size=3),
        "3 is not divisible",
        partition_over_three,
    ),
    "hpz_above_world": Changed(zero(3, zero_hpz_partition_size=4), partition_size, 1),
    "allgather_bucket": Ignored(zero(3), {"zero_optimization": {"allgather_bucket_size": 8}}, felt=zero(2)),
    "allgather_odd": Refused(zero(2, allgather_bucket_size=9), zero(2, allgather_bucket_size=8), "must be a multiple"),
    "allgather_partitions": Ignored(zero(2), {"zero_optimization": {"allgather_partitions": False}}),
    "stage0_keys": Ignored(
        zero(0),
        {
            "zero_optimization": {
                "overlap_comm": True,
                "reduce_bucket_size": 100,
                "contiguous_gradients": False,
                "reduce_scatter": False,
            }
        },
        felt=zero(2),
    ),
    "stage12_keys": Ignored(
        zero(3),
        {
            "zero_optimization": {
                "use_multi_rank_bucket_allreduce": False,
                "round_robin_gradients": True,
                "ignore_unused_parameters": False,
                "parameter_alignment": True,
                "elastic_checkpoint": True,
            }
        },
        felt=zero(2),
    ),
    "bf16_optimizer_keys": Ignored(
        {**zero(1), **FP32_GRADIENTS},
        {
            "zero_optimization": {
                "overlap_comm": True,
                "reduce_bucket_size": 100,
                "contiguous_gradients": False,
                "reduce_scatter": False,
                "use_multi_rank_bucket_allreduce": False,
                "round_robin_gradients": True,
                "ignore_unused_parameters": False,
                "parameter_alignment": True,
                "elastic_checkpoint": True,
            }
        },
        felt=zero(1),
    ),
    "overlap_cpu": Ignored(zero(3), {"zero_optimization": {"overlap_comm": False}}),
    "contiguous_forced": Changed(
        zero(2, offload_optimizer=CPU, contiguous_gradients=False),
        lambda engine: engine.optimizer.contiguous_gradients,
        True,
    ),
    "allgather_sequential": Changed(
        zero(3, stage3_allgather_sequential=True, stage3_prefetch_bucket_size=50),
        lambda engine: engine.optimizer.prefetch_elements,
        1,
    ),
    "legacy_stage1": Refused(zero(1, legacy_stage1=True), zero(1), "deprecated version of ZeRO Stage 1"),
    "reduce_scatter_scaled": Refused(
        {"prescale_gradients": True, **zero(3)},
        {"prescale_gradients": True, **zero(3, reduce_scatter=False)},
        "pre-scale gradients is not yet supported",
    ),
    "managed_overlap": Refused(
        {"managed_gradient_accumulation": False, **zero(1, overlap_comm=True)},
        {"managed_gradient_accumulation": False, **zero(2, overlap_comm=True)},
        "supports ZeRO overlap_comm only",
    ),
    "grad_norm": Refused(
        zero(2, compute_grad_norm=False),
        {"gradient_clipping": 0.0, **zero(2, compute_grad_norm=False)},
        "requires gradient_clipping=0",
    ),
    "allreduce_op": Refused(
        {"gradient_allreduce_op": "max"}, {"gradient_allreduce_op": "SUM"}, "Invalid gradient_allreduce_op", read
    ),
    "allreduce_sum": Refused(
        {"gradient_allreduce_op": "sum", **zero(3)},
        {"gradient_allreduce_op": "sum", **zero(2)},
        "not supported with",
        read,
    ),
    # activation checkpointing
    "checkpointing_section": Ignored({}, {"activation_checkpointing": {"cpu_checkpointing": True}}),
    "contiguous_partition": Refused(
        {"activation_checkpointing": {**CHECKPOINTING, "partition_activations": False}},
        {"activation_checkpointing": CHECKPOINTING},
        "only available with partitioned",
        configure_checkpointing,
    ),
    "contiguous_number": Refused(
        {"activation_checkpointing": {**CHECKPOINTING, "number_checkpoints": None}},
        {"activation_checkpointing": CHECKPOINTING},
        "Must specify the number of layers",
        configure_checkpointing,
    ),
}

# Not DeepSpeed's: test_space.py shows what becomes of these knobs.
OURS = {
    "checkpoint_nothing": "autotune checkpoints blocks itself",
    "allocator_cpu": "torch's CUDA allocator, not DeepSpeed",
    "garbage_expandable": "torch's CUDA allocator, which has to be read: it needs a CUDA device to run",
}
WORLD_OF_THREE = {"hpz_divides"}


def evident(kind: Kind) -> list[Rule]:
    return [rule for rule in RULES if rule.kind is kind and rule.id not in OURS]


def keys_of(config: Mapping[str, Any], prefix: str = "") -> set[str]:
    return {
        key
        for name, value in config.items()
        for key in ({prefix + name} | (keys_of(value, f"{prefix}{name}.") if isinstance(value, Mapping) else set()))
    }


def test_every_rule_has_evidence_of_its_kind() -> None:
    kinds = {Kind.REFUSE: Refused, Kind.IGNORE: Ignored, Kind.CHANGE: Changed}
    assert set(EVIDENCE) | set(OURS) == set(BY_ID)
    assert len(BY_ID) == len(RULES)
    assert [
        rule.id for rule in RULES if rule.id in EVIDENCE and not isinstance(EVIDENCE[rule.id], kinds[rule.kind])
    ] == []


@pytest.mark.parametrize("rule", evident(Kind.REFUSE), ids=lambda rule: rule.id)
def test_deepspeed_refuses(rule: Rule, engines: Any) -> None:
    evidence = EVIDENCE[rule.id]
    assert isinstance(evidence, Refused)
    world = 3 if rule.id in WORLD_OF_THREE else 1
    assert rule.broken(engines.situation(evidence.bad, world))
    assert not rule.broken(engines.situation(evidence.good, world))
    evidence.by(engines, evidence.good)
    with pytest.raises(Exception, match=re.escape(evidence.message)):
        evidence.by(engines, evidence.bad)


@pytest.mark.parametrize("rule", evident(Kind.IGNORE), ids=lambda rule: rule.id)
def test_deepspeed_ignores(rule: Rule, engines: Any) -> None:
    evidence = EVIDENCE[rule.id]
    assert isinstance(evidence, Ignored)
    written = engines.merged(evidence.config, evidence.keys)
    assert rule.broken(engines.situation(written))
    assert set(rule.keys) <= keys_of(evidence.keys)
    look = engines.config if evidence.config_only else engines.effective
    assert look(written) == look(evidence.config)
    if evidence.felt is not None:
        felt = engines.merged(evidence.felt, evidence.keys)
        assert not rule.broken(engines.situation(felt))
        assert look(felt) != look(evidence.felt)


@pytest.mark.parametrize("rule", evident(Kind.CHANGE), ids=lambda rule: rule.id)
def test_deepspeed_changes(rule: Rule, engines: Any) -> None:
    evidence = EVIDENCE[rule.id]
    assert isinstance(evidence, Changed)
    situation = engines.situation(evidence.config)
    assert rule.broken(situation) == [rule.keys[0]]
    assert engines.run(evidence.config, evidence.effective) == evidence.value
    if rule.becomes is not None:
        assert rule.becomes(situation) == evidence.value != situation.get(rule.keys[0])


def test_deepspeed_refuses_parameters_on_nvme_without_a_path_too(engines: Any) -> None:
    change = zero(3, offload_param={"device": "nvme"})
    assert BY_ID["nvme_path"].broken(engines.situation(change)) == ["zero_optimization.offload_param.nvme_path"]
    with pytest.raises(AssertionError, match='"nvme_path" in DeepSpeed Config cannot be None'):
        engines.run(change)


def test_nothing_configures_deepspeeds_checkpointing_but_the_model(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.activation_checkpointing import checkpointing

    monkeypatch.setattr(checkpointing, "deepspeed_checkpointing_enabled", False)
    engines.run({"activation_checkpointing": CHECKPOINTING})
    assert not checkpointing.is_configured()


@pytest.mark.parametrize("key", schema.REMOVED)
def test_deepspeed_refuses_what_is_left_of_removed_features(key: str, engines: Any) -> None:
    section, _, name = key.rpartition(".")
    with pytest.raises(Exception, match="removed"):
        engines.config({section: {name: 1}} if section else {name: {}})


@pytest.mark.parametrize("section", schema.STRICT)
def test_the_schema_knows_the_keys_of_every_section_that_deepspeed_checks(section: str, engines: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig(engines.full(zero(3, offload_param=CPU, offload_optimizer=CPU, zenflow={})))
    places = {
        "zero_optimization": config.zero_config,
        "zero_optimization.offload_param": config.zero_config.offload_param,
        "zero_optimization.offload_optimizer": config.zero_config.offload_optimizer,
        "zero_optimization.zenflow": config.zero_config.zenflow,
        "bf16": config.bfloat16_config,
        "fp16": config.float16_config,
        "compile": config.compile_config,
        "tensor_parallel": config.tensor_parallel_config,
        "hybrid_engine": config.hybrid_engine,
        "tensorboard": config.monitor_config.tensorboard,
        "wandb": config.monitor_config.wandb,
        "csv_monitor": config.monitor_config.csv_monitor,
    }
    fields = type(places[section]).model_fields
    assert schema.STRICT[section] == {described.alias or name for name, described in fields.items()}


def test_the_schema_knows_every_key_that_deepspeed_looks_for(engines: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    class Watched(dict[str, Any]):
        seen: ClassVar[set[str]] = set()

        def get(self, key: str, default: Any = None) -> Any:
            self.seen.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            self.seen.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            self.seen.add(key)
            return super().__getitem__(key)

    DeepSpeedConfig(Watched(train_micro_batch_size_per_gpu=1))
    removed = {key for key in schema.REMOVED if "." not in key}
    assert Watched.seen - removed <= schema.TOP_LEVEL
