"""What an exception in a rank means: out of memory, refused by DeepSpeed, diverged, or a crash."""

from __future__ import annotations

import errno
import re

from autotune.workload.phase import Phase

_CPU_ALLOCATION = re.compile(
    r"can't allocate memory|not enough memory|cannot allocate memory|bad_alloc|can't start new thread|"
    r"resource temporarily unavailable|unable to mmap|failed to allocate",
    re.IGNORECASE,
)
_CUDA_ALLOCATION = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", re.IGNORECASE)
_PINNED = re.compile(r"pin(ned)?[ _]memory|cudaHostAlloc|cudaHostRegister", re.IGNORECASE)
_PEER_LOST = re.compile(
    r"gloo/transport|connection (closed|reset) by peer|socket timeout|broken pipe|"
    r"NCCL (error|communicator)|remote process",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"no space left on device|error while creating shared memory segment", re.IGNORECASE)
_REQUEST = (
    (re.compile(r"tried to allocate (\d+) bytes"), 1),
    (re.compile(r"Tried to allocate ([\d.]+) KiB"), 2**10),
    (re.compile(r"Tried to allocate ([\d.]+) MiB"), 2**20),
    (re.compile(r"Tried to allocate ([\d.]+) GiB"), 2**30),
)


class DivergedError(Exception):
    """Raised when the loss is not finite, or step after step is skipped.

    Args:
        phase: where that comes from; it is noticed later.
        message: what was seen.
    """

    def __init__(self, phase: Phase, message: str) -> None:
        super().__init__(message)
        self.phase = phase


class UnfitRank(Exception):
    """Raised when a rank cannot do its work because of how it was started."""


def requested_bytes(error: Exception) -> int:
    """The size of the request that failed, where the allocator's message tells it; else 0."""
    for pattern, unit in _REQUEST:
        if found := pattern.search(str(error)):
            return int(float(found[1]) * unit)
    return 0


def classify(error: Exception, phase: Phase, full: bool, on_cpu: bool) -> str:
    """The outcome that an exception stands for.

    Args:
        error: what a rank caught.
        phase: what it was doing.
        full: whether the emulated device was full (on a CPU): the kernel may refuse memory or threads for other
            reasons, and those are not the device's.
        on_cpu: whether the device is an emulated one.
    """
    if isinstance(error, DivergedError):
        return "diverged"
    if isinstance(error, UnfitRank) or is_no_space(error):
        return "infra"
    if on_cpu:
        if is_allocation_failure(error) and full:
            return "oom_device"
    elif type(error).__name__ == "OutOfMemoryError":
        return "oom_device"
    elif isinstance(error, RuntimeError) and _CUDA_ALLOCATION.search(str(error)):
        return "oom_host" if _PINNED.search(str(error)) else "oom_device"
    elif isinstance(error, MemoryError):
        return "oom_host"
    return "invalid" if phase is Phase.INIT and _is_refusal(error) else "crashed"


def is_no_space(error: Exception) -> bool:
    """Whether a disk or /dev/shm is full: trouble of the machine, which says nothing about what ran."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return isinstance(error, RuntimeError) and bool(_NO_SPACE.search(str(error)))


def is_peer_lost(error: Exception) -> bool:
    """Whether a rank only saw that another one was gone: a consequence, not a cause."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_LOST.search(str(error)))


def is_allocation_failure(error: Exception) -> bool:
    """Whether memory (or a thread, which needs some) could not be had."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
        return True
    return isinstance(error, RuntimeError) and bool(_CPU_ALLOCATION.search(str(error)))


def _is_refusal(error: Exception) -> bool:
    """Whether DeepSpeed said no to the configuration (pydantic's ValidationError is a ValueError)."""
    if isinstance(error, AssertionError | ValueError | NotImplementedError | TypeError | KeyError):
        return True
    return any(kind.__name__ in ("ZeRORuntimeException", "DeepSpeedConfigError") for kind in type(error).__mro__)
