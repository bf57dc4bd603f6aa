"""What stands in for kernels that a device without data cannot run: DeepSpeed's fused operations.

Each saves and allocates exactly what the real one does, and computes nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from autotune.probe.virtual.compute import NotTraceable
from autotune.probe.virtual.cuda_set import use_cuda_set
from autotune.probe.virtual.recorder import Recorder


class _Operation:
    """A kernel that reads and writes its tensors in place and allocates nothing."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, f"deepspeed::{name}"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.kernel(self._name, args)


# DeepSpeed's C++ and CUDA operations, by the name of their builder. The optimizers' own Python, which allocates their
# states, is DeepSpeed's.
_OPERATIONS = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    "cpu_adam": ("create_adam", "destroy_adam", "adam_update", "adam_rollback"),
    "cpu_lion": ("create_lion", "destroy_lion", "lion_update"),
    "cpu_adagrad": ("create_adagrad", "destroy_adagrad", "adagrad_update"),
}
# torch's own pair, which DeepSpeed compiles a second time
_UTILS = SimpleNamespace(flatten=torch._C._nn.flatten_dense_tensors, unflatten=torch._C._nn.unflatten_dense_tensors)


def replace_deepspeed_operations(recorder: Recorder) -> None:
    """Give DeepSpeed the stand-ins where it would load, and first compile, its operations."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(self: Any, verbose: bool = True) -> Any:
        if self.name == "utils":
            return _UTILS
        if self.name not in _OPERATIONS:
            raise NotTraceable(f"DeepSpeed's operation {self.name}, which has no stand-in")
        return SimpleNamespace(**{name: _Operation(recorder, name) for name in _OPERATIONS[self.name]})

    OpBuilder.load = load


def use_cuda_kernels(product: str = "") -> None:
    """Have the virtual device run what CUDA would run on a device of that name (machine.device)."""
    use_cuda_set(product)
