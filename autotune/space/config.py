"""Candidate to DeepSpeed config: complete, numbers only, the very file that probes run and that is handed over."""

from __future__ import annotations

from typing import Any

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.space.rule import Situation
from autotune.workload.workload import Workload


def deepspeed_config(
    candidate: Candidate, workload: Workload, machine: Machine, nvme_path: str | None = None
) -> dict[str, Any]:
    """The config of one canonical candidate: every key that DeepSpeed reads for it, and no other.

    Defaults that differ between DeepSpeed's versions or between stages are written out. `train_batch_size` is left
    out, because it depends on the world size.

    Args:
        candidate: canonical, as the space lists it.
        workload: gives optimizer, scheduler, clipping and number formats.
        machine: decides whether host memory can be pinned.
        nvme_path: the folder for offloading to nvme (`space.nvme_path`).

    Raises:
        SettingsError: the candidate offloads to nvme and no path is given.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": candidate.micro_batch,
        "gradient_accumulation_steps": candidate.accumulation,
        **workload_config(workload),
        "zero_optimization": _zero(candidate, machine, nvme_path),
    }
    if candidate.precision != "fp32":
        config[candidate.precision] = {"enabled": True}
    situation = Situation(config)
    if situation.bf16_optimizer:
        del config["zero_optimization"]["contiguous_gradients"], config["zero_optimization"]["reduce_scatter"]
    elif candidate.precision == "bf16" and candidate.zero_stage in (1, 2):
        config["bf16"]["check_grad_overflow"] = True
    return config


def workload_config(workload: Workload) -> dict[str, Any]:
    """The keys that the workload alone decides."""
    config: dict[str, Any] = {
        "gradient_clipping": workload.gradient_clipping,
        "optimizer": {"type": workload.optimizer.type, "params": dict(workload.optimizer.params)},
    }
    if workload.scheduler is not None:
        config["scheduler"] = {"type": workload.scheduler.type, "params": dict(workload.scheduler.params)}
    if workload.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": workload.grad_accum_dtype}
    if workload.communication_data_type is not None:
        config["communication_data_type"] = workload.communication_data_type
    return config


def _zero(candidate: Candidate, machine: Machine, nvme_path: str | None) -> dict[str, Any]:
    stage = candidate.zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return zero
    zero["contiguous_gradients"] = True
    zero["reduce_scatter"] = True
    names = ["overlap_comm", "reduce_bucket_size", "allgather_bucket_size"]
    if stage == 3:
        names += ["stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"]
        names += ["stage3_max_reuse_distance", "zero_hpz_partition_size"]
        zero["sub_group_size"] = 1_000_000_000
    zero |= {name: value for name in names if (value := getattr(candidate, name)) is not None}
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(candidate, name)
        if device is not None:
            zero[name] = _offload(name, device, machine, nvme_path)
    return zero


def _offload(name: str, device: str, machine: Machine, nvme_path: str | None) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device, "pin_memory": machine.accelerator == "cuda"}
    if device == "nvme":
        if nvme_path is None:
            raise SettingsError(
                f"{name}=nvme needs space.nvme_path, the folder on the drive", "space.nvme_path=/local_nvme"
            )
        section["nvme_path"] = nvme_path
        section |= (
            {"buffer_count": 4} if name == "offload_optimizer" else {"buffer_count": 5, "buffer_size": 100_000_000}
        )
    return section


def allocator_environment(candidate: Candidate) -> dict[str, str]:
    """The environment variable that gives torch's CUDA allocator the candidate's settings; empty where it has none."""
    settings = []
    if candidate.expandable_segments is not None:
        settings.append(f"expandable_segments:{candidate.expandable_segments}")
    if candidate.garbage_collection_threshold is not None:
        settings.append(f"garbage_collection_threshold:{candidate.garbage_collection_threshold}")
    return {"PYTORCH_ALLOC_CONF": ",".join(settings)} if settings else {}
