"""The NVIDIA devices here: whether the check can run on them, and how much of their memory is in use."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

from autotune.machine.detect import visible_gpus

SLACK = 64 * 2**20
"""What is in use may differ by so much from what it was, bytes."""
SETTLE_S = 10.0
"""The driver takes a moment to give back what a process held that has ended, seconds."""


def missing() -> str:
    """Why the check cannot run here, one sentence; empty where it can.

    Raises:
        SettingsError: there are devices, and NVML's Python binding is missing or fails.
    """
    if not visible_gpus():
        return "no NVIDIA device is visible here: this check compares predictions with a GPU's own counters"
    for package in ("torch", "deepspeed", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: this check runs DeepSpeed on the GPU here"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: this check runs DeepSpeed on the GPU here"
    return ""


def used_bytes() -> int:
    """What is in use on all visible devices together, by the driver's own account; asks without touching CUDA."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in visible_gpus()]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def left_over(used: Callable[[], int], before: int) -> int:
    """Bytes in use beyond what was before, once they no longer fall; at most SLACK where everything was given back."""
    deadline = time.monotonic() + SETTLE_S
    while (more := used() - before) > SLACK and time.monotonic() < deadline:
        time.sleep(0.2)
    return more
