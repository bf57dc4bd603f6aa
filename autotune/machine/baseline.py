"""The devices between probes: each must be as empty as it was before the first, else it is set aside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from autotune.errors import InfraError
from autotune.machine.health import GpuState, gpu_states, held

BACK_S = 15.0
"""A device has so long to give memory back after its processes are gone, seconds: the driver takes a few."""
SLACK = 64 * 2**20
"""What the driver may hold more than before, bytes: less than the context of any process."""


class Baseline:
    """What the devices here held before the first probe, and which of them have not come back to it since.

    Args:
        devices: that a probe takes.
        read: the devices as they are; none on a machine without GPUs.
    """

    def __init__(self, devices: int, read: Callable[[], Iterable[GpuState]] = gpu_states) -> None:
        self._needed, self._read = devices, read
        self._before = {gpu.index: gpu.used_bytes for gpu in read()}
        self._aside: dict[int, str] = {}

    @property
    def spared(self) -> list[int] | None:
        """The devices that the next probe takes, as CUDA counts them; None where none is set aside.

        Raises:
            InfraError: too few are left.
        """
        if not self._aside:
            return None
        left = [index for index in self._before if index not in self._aside]
        if len(left) < self._needed:
            raise InfraError(
                f"{'; '.join(self._aside.values())}: {len(left)} devices are left, and a probe takes {self._needed}",
                "end what holds them (nvidia-smi shows it), or reset them; everything measured is kept, and the same "
                "command goes on",
            )
        return left[: self._needed]

    def returned(self) -> list[str]:
        """Wait until the devices are as they were, or BACK_S; then a sentence for each that is now set aside."""
        deadline = time.monotonic() + BACK_S
        while (late := self._late()) and time.monotonic() < deadline:
            time.sleep(0.2)
        said = {gpu.index: f"{held(gpu)} {BACK_S:.0f} s after a probe, and it is set aside" for gpu in late}
        self._aside |= said
        return list(said.values())

    def _late(self) -> list[GpuState]:
        devices = self._read() if self._before else []
        return [
            gpu for gpu in devices if gpu.index not in self._aside and gpu.used_bytes > self._before[gpu.index] + SLACK
        ]
