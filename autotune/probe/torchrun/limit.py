"""The memory of an emulated device on a CPU: a budget that the kernel enforces (RLIMIT_DATA).

During every operation on tensors the process is allowed as much more private memory as the device has left, so that
a tensor too many is a real failed allocation. Code, Python objects, threads, what the math library keeps and all that
belongs to the host are nobody's limit.
"""

from __future__ import annotations

import ctypes
import os
import resource

from autotune.probe.torchrun.procfs import PAGE

NEAR = 0.05
"""A death counts as device OOM only when use, with the request that failed, was this near to the budget or above."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def return_freed_memory(at_once: bool) -> None:
    """Have glibc give freed tensors back to the kernel at once, so that use is what is live; or let it keep them.

    By itself glibc raises its threshold to 32 MiB and keeps freed blocks below that in its heap, from which a tensor
    too many could still be served. Giving back costs page faults, so timed steps run with glibc's own habit.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 64 * 1024 if at_once else 32 * 2**20)
    libc.mallopt(_M_TRIM_THRESHOLD, 64 * 1024 if at_once else 64 * 2**20)
    if at_once:
        libc.malloc_trim(0)


class DeviceLimit:
    """Puts RLIMIT_DATA at what the emulated device has left, and takes it away.

    Args:
        budget: memory of the device, bytes.
    """

    def __init__(self, budget: int) -> None:
        return_freed_memory(at_once=True)
        self.budget = budget
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._hard = resource.getrlimit(resource.RLIMIT_DATA)[1]

    def allow(self, live: int, host_to_come: int) -> None:
        """Allow what the device has left, and what the host is still to get.

        Args:
            live: bytes of the device's tensors.
            host_to_come: bytes that will belong to the host and are not there yet.
        """
        # The sixth field counts pages of private writable memory, as RLIMIT_DATA does, and the main stack.
        data = int(os.pread(self._statm, 256, 0).split()[5]) * PAGE
        left = max(self.budget - live + host_to_come, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (data + left, self._hard))

    def lift(self) -> None:
        """Take the limit away: a thread that cannot be started, say, ends or hangs the process."""
        resource.setrlimit(resource.RLIMIT_DATA, (self._hard, self._hard))
