"""The other ranks of a virtual world: every collective comes back at once, with nothing done."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.machine.machine import Machine


def join_world(rank: int, machine: Machine) -> None:
    """Become one rank of a world whose other ranks answer every collective at once, with nothing."""
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    import deepspeed.runtime.zero.utils as zero_utils

    local = rank % machine.devices_per_node
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(machine.world_size),
        LOCAL_WORLD_SIZE=str(machine.devices_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    dist.init_process_group("fake", rank=rank, world_size=machine.world_size, store=FakeStore())
    # `deepspeed.comm.torch`, the attribute, is torch itself. Its shared-memory operation would wait for peers.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    for module in (zero_utils, coordinator):
        for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            setattr(module, name, _agreeing(getattr(zero_utils, name)))
    deepspeed.init_distributed(dist_backend="fake", verbose=False)


def hold_as_gloo() -> None:
    """Have asynchronous collectives hold their tensors until their handle is gone, as gloo's do; NCCL lets go early."""
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast", "reduce", "all_gather"):
        setattr(dist, name, _holding(getattr(dist, name)))
    scatter = dist.reduce_scatter_tensor

    def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = scatter(output, tensor, *args, **kwargs)
        output.copy_(tensor.view(-1)[: output.numel()].view_as(output))  # gloo reduces in the input and copies a part
        return work

    dist.reduce_scatter_tensor = reduce_scatter  # type: ignore[assignment] # the same, with output and input named


def _holding(collective: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        return None if work is None else _Held(work, (args, kwargs))

    return run


class _Held:
    """A collective's handle with what it holds."""

    def __init__(self, work: Any, tensors: Any) -> None:
        self._work, self._tensors = work, tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _agreeing(check: Any) -> Any:
    """A comparison with the other ranks that goes through its motions; what rank 0 sent is not known here."""

    def agree(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):
            check(*args, **kwargs)

    return agree
