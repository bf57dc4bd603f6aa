"""The config that probes run and that is handed over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.settings import compose_settings
from autotune.space.config import allocator_environment, deepspeed_config
from autotune.space.space import Space
from autotune.workload.workload import Scheduler, Workload

GPUS = Machine(name="gpus")
STAGE3 = Candidate(2, 4, 3, "bf16", overlap_comm=True, reduce_bucket_size=1000, stage3_max_live_parameters=7)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


def test_a_candidate_becomes_the_keys_that_its_stage_reads() -> None:
    config = deepspeed_config(STAGE3, Workload(), GPUS)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["bf16"] == {"enabled": True}
    assert config["zero_optimization"] == {
        "stage": 3,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "sub_group_size": 1_000_000_000,
        "overlap_comm": True,
        "reduce_bucket_size": 1000,
        "stage3_max_live_parameters": 7,
    }
    assert "train_batch_size" not in config
    assert "activation_checkpointing" not in config


def test_stage_0_is_only_its_number() -> None:
    assert deepspeed_config(Candidate(1, 1, 0, "fp32"), Workload(), GPUS)["zero_optimization"] == {"stage": 0}


def test_defaults_that_differ_between_versions_are_written_out() -> None:
    config = deepspeed_config(Candidate(1, 1, 2, "bf16", offload_optimizer="cpu"), Workload(gradient_clipping=0), GPUS)
    assert config["gradient_clipping"] == 0
    assert config["bf16"]["check_grad_overflow"] is True
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


def test_host_memory_is_pinned_for_cuda_devices_only() -> None:
    offloaded = STAGE3.replace(offload_param="cpu")
    config = deepspeed_config(offloaded, Workload(), Machine(name="cpu", accelerator="cpu"))
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False}


def test_the_workloads_sections_are_passed_on() -> None:
    workload = Workload(
        scheduler=Scheduler("WarmupLR", {"warmup_num_steps": 10}),
        grad_accum_dtype="fp32",
        communication_data_type="bf16",
    )
    config = deepspeed_config(Candidate(1, 1, 1, "bf16"), workload, GPUS)
    assert config["scheduler"] == {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["communication_data_type"] == "bf16"
    assert config["zero_optimization"] == {"stage": 1}  # BF16_Optimizer reads nothing else
    assert "scheduler" not in deepspeed_config(Candidate(1, 1, 1, "bf16"), Workload(), GPUS)


def test_nvme_needs_its_path() -> None:
    offloaded = STAGE3.replace(offload_optimizer="nvme")
    with pytest.raises(SettingsError, match=r"space.nvme_path"):
        deepspeed_config(offloaded, Workload(), GPUS)
    section = deepspeed_config(offloaded, Workload(), GPUS, "/nvme")["zero_optimization"]["offload_optimizer"]
    assert section == {"device": "nvme", "pin_memory": True, "nvme_path": "/nvme", "buffer_count": 4}


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ({}, {}),
        ({"expandable_segments": True}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"expandable_segments": False, "garbage_collection_threshold": 0.8},
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False,garbage_collection_threshold:0.8"},
        ),
    ],
)
def test_the_allocators_knobs_become_its_environment(settings: dict[str, Any], environment: dict[str, str]) -> None:
    assert allocator_environment(STAGE3.replace(**settings)) == environment


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["core", "full"])
def test_deepspeed_reads_the_configs_as_they_are(name: str, engines: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    swept = compose_settings([f"space={name}", "machine=cpu"])
    space = Space(swept)
    for candidate in space.candidates[:: len(space.candidates) // 40]:
        config = deepspeed_config(candidate, swept.workload, swept.machine)
        assert config == json.loads(json.dumps(config))
        assert "auto" not in leaves(config)
        read = DeepSpeedConfig(config)
        assert read.zero_config.stage == candidate.zero_stage
        assert read.train_micro_batch_size_per_gpu == candidate.micro_batch
        if candidate.reduce_bucket_size is not None:
            assert read.zero_config.reduce_bucket_size == candidate.reduce_bucket_size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stage", "offloaded"), [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
)
def test_deepspeed_trains_with_them(stage: int, offloaded: bool, engines: Any) -> None:
    swept = compose_settings(["machine=cpu", "space.reduce_bucket_size=1000", f"space.zero_stage={stage}"])
    swept.space.offload_optimizer = "cpu" if offloaded else "none"
    swept.space.offload_param = "cpu" if offloaded and stage == 3 else "none"
    candidate = Space(swept).candidates[0]
    engines.run(deepspeed_config(candidate.replace(accumulation=1), swept.workload, swept.machine), steps=2)
