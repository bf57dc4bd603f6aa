"""What the tensors that DeepSpeed holds are: parameters, gradients, optimizer state, communication buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

PARAMETERS, GRADIENTS = "parameters", "gradients"
OPTIMIZER_STATE, COMMUNICATION = "optimizer state", "communication buffers"

# Attributes of DeepSpeed 0.19's optimizers (stage_1_and_2.py, stage3.py, bf16_optimizer.py, fused_optimizer.py). The
# first role that claims a storage keeps it.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    COMMUNICATION: ("ipg_buckets", "ipg_buffer", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"),
    OPTIMIZER_STATE: (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
    ),
    GRADIENTS: (
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "temp_grad_buffer_for_cpu_offload",
        "accumulated_grads_in_cpu",
        "fp32_groups_gradients",
        "fp32_groups_gradients_flat",
    ),
    PARAMETERS: (
        "bit16_groups_flat",
        "fp16_groups_flat",
        "fp16_partitioned_groups_flat",
        "param_groups_fp16_flat_cpu_memory",
        "param_buffer_of_bit16_for_cpu_offload_groups",
        "lp_param_buffer",
    ),
}


def roles(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Role → the tensors that have it, of a DeepSpeed engine between two steps."""
    optimizer = engine.optimizer
    found: dict[str, list[torch.Tensor]] = {}
    for role, names in _ATTRIBUTES.items():
        found[role] = [t for name in names for t in tensors_in(getattr(optimizer, name, None))]
    inner = getattr(optimizer, "optimizer", optimizer)
    found[OPTIMIZER_STATE] += list(tensors_in(list(inner.state.values())))
    found[GRADIENTS] += [
        p.grad for group in inner.param_groups for p in group["params"] if isinstance(p.grad, torch.Tensor)
    ]
    for parameter in engine.module.parameters():
        found[PARAMETERS] += [parameter, *tensors_in(getattr(parameter, "ds_tensor", None))]
        found[GRADIENTS] += [] if parameter.grad is None else [parameter.grad]
    found[PARAMETERS] += list(engine.module.buffers())
    return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, lists and dictionaries of them looked through."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "buffer"):  # stage 1 and 2's buckets
        yield from tensors_in(value.buffer)
