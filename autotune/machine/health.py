"""The devices and the host before a study, as they are: busy with someone else's work, throttled, nearly full.

What is read (NVML, /proc) is kept apart from what is made of it, so that the latter is tried without a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import InfraError
from autotune.machine.detect import visible_gpus
from autotune.machine.machine import Machine, gib

LOOK_S = 0.25
"""Processes are watched for so long, seconds."""
BUSY_SHARE = 0.05
"""Processor time that others use is worth a word from this share of the cores on, and from a quarter of one core."""
HELD_SHARE = 0.01
"""So is this share of a device's memory; below lies what the driver and a display hold."""
HOST_SHARE = 1 / 3
"""So is this share of the host's memory, or a tenth of that in swap."""
LEAST_FREE = 0.05
"""On a device with less of its memory free nothing can run."""
THROTTLED = {
    0x08: "slowed down by its hardware",
    0x20: "too hot, slowed down by its driver",
    0x40: "too hot, slowed down by its hardware",
    0x80: "short of power, slowed down by its hardware",
}
"""NVML's clock event reasons that are faults: that it is idle, or at its power limit under load, is none."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on a device; `size` is 0 where the driver does not tell."""

    pid: int
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """One device as its driver describes it now. None where the device has no such thing.

    Attributes:
        index: as CUDA counts here.
        used_bytes: of its memory, by anyone, without what the driver keeps for itself.
        busy_percent: of the last moment, in which some kernel ran.
        events: bits of NVML's clock event reasons.
        repair_pending: rows of its memory wait for a restart to be replaced.
        partitioned: into MIG instances.
    """

    index: int
    used_bytes: int
    total_bytes: int
    busy_percent: int | None = None
    holders: Sequence[Holder] = ()
    events: int | None = None
    repair_pending: bool | None = None
    partitioned: bool | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """The host as it is now.

    Attributes:
        cores: that this process may run on.
        busy_cores: processor time that other processes use.
        busiest: the one that uses most of it, as `pid 4711 (python)`.
        quota_cores: what the control group allows, None for no limit.
        available_bytes, total_bytes, swapped_bytes: of memory.
    """

    cores: int
    busy_cores: float
    busiest: str
    available_bytes: int
    total_bytes: int
    swapped_bytes: int = 0
    quota_cores: float | None = None


def look(machine: Machine) -> list[str]:
    """What is to be known of the devices and the host here before a study, a sentence each.

    Raises:
        InfraError: a device is so full that nothing can run on it.
    """
    gpus = list(gpu_states()) if machine.accelerator != "cpu" else []
    gpus = gpus[: machine.devices_per_node]
    if full := [gpu for gpu in gpus if gpu.total_bytes - gpu.used_bytes < LEAST_FREE * gpu.total_bytes]:
        raise InfraError(
            f"{held(full[0])}: nothing can run beside it",
            "end what holds it, or choose other devices with CUDA_VISIBLE_DEVICES",
        )
    return [*(said for gpu in gpus for said in of_gpu(gpu)), *of_host(host_state())]


def of_gpu(gpu: GpuState) -> list[str]:
    """What is wrong with a device."""
    found = []
    if gpu.used_bytes > HELD_SHARE * gpu.total_bytes or gpu.holders:
        found.append(held(gpu))
    elif gpu.busy_percent and gpu.busy_percent > 100 * BUSY_SHARE:
        found.append(f"device {gpu.index} is busy with someone else's work for {gpu.busy_percent} % of the time")
    found += [f"device {gpu.index} is {reason}" for bit, reason in THROTTLED.items() if (gpu.events or 0) & bit]
    if gpu.repair_pending:
        found.append(f"device {gpu.index} has faulty memory that waits for a restart to be replaced")
    if gpu.partitioned:
        found.append(f"device {gpu.index} is partitioned (MIG): a part of it is measured")
    return found


def held(gpu: GpuState) -> str:
    """Who holds a device's memory."""
    by = ", ".join(f"pid {holder.pid} ({holder.name})" for holder in gpu.holders)
    who = by or "processes that cannot be seen from here"
    return f"device {gpu.index} is busy with someone else's work: {gib(gpu.used_bytes)} held by {who}"


def of_host(host: HostState) -> list[str]:
    """What is wrong with the host."""
    found = []
    if host.busy_cores > max(BUSY_SHARE * host.cores, 0.25):
        by = f", most by {host.busiest}" if host.busiest else ""
        found.append(f"the processor is busy with someone else's work: {host.busy_cores:.1f} of {host.cores} cores{by}")
    if host.quota_cores is not None and host.quota_cores < host.cores:
        allowed = f"{host.quota_cores:.1f} of {host.cores} cores"
        found.append(f"the control group allows {allowed}: ranks stand still when it is used up")
    if (taken := host.total_bytes - host.available_bytes) > HOST_SHARE * host.total_bytes:
        found.append(f"someone else's work holds {gib(taken)} of {gib(host.total_bytes)} host memory")
    if host.swapped_bytes > HOST_SHARE / 10 * host.total_bytes:
        found.append(f"{gib(host.swapped_bytes)} of host memory is swapped out")
    return found


def host_state() -> HostState:
    """The host here. Takes LOOK_S."""
    before, began = _processor_times(), time.monotonic()
    time.sleep(LOOK_S)
    after, seconds = _processor_times(), time.monotonic() - began
    used = {pid: (spent - before[pid][0]) / seconds for pid, (spent, _) in after.items() if pid in before}
    top = max(used, key=lambda pid: used[pid], default=None)
    memory = psutil.virtual_memory()
    return HostState(
        cores=len(os.sched_getaffinity(0)),
        busy_cores=sum(used.values()),
        busiest=f"pid {top} ({after[top][1]})" if top is not None else "",
        available_bytes=memory.available,
        total_bytes=memory.total,
        swapped_bytes=psutil.swap_memory().used,
        quota_cores=quota_cores(),
    )


def quota_cores() -> float | None:
    """The processors that this process's control group (version 2) allows, None for no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _processor_times() -> dict[int, tuple[float, str]]:
    """Process → processor seconds so far and name, of all but this one."""
    found = {}
    for process in psutil.process_iter(["cpu_times", "name"]):
        times = process.info["cpu_times"]
        if process.pid != os.getpid() and times is not None:
            found[process.pid] = (times.user + times.system, process.info["name"])
    return found


def gpu_states() -> Iterator[GpuState]:
    """The NVIDIA devices that CUDA would show to a process started here, as they are."""
    gpus = visible_gpus()
    if not gpus:
        return
    import pynvml

    pynvml.nvmlInit()
    try:
        for index, gpu in enumerate(gpus):
            yield _Nvml(pynvml, gpu.uuid).state(index)
    finally:
        pynvml.nvmlShutdown()


class _Nvml:
    """Reads one device; what a device or a driver does not support is None."""

    def __init__(self, pynvml: Any, uuid: str) -> None:
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def state(self, index: int) -> GpuState:
        """The device as it is now."""
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        rows = self._ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
        mig = self._ask("nvmlDeviceGetMigMode")  # now, after a restart
        running = self._ask("nvmlDeviceGetComputeRunningProcesses") or []
        return GpuState(
            index=index,
            used_bytes=int(memory.used),
            total_bytes=int(memory.total) - int(memory.reserved),
            busy_percent=int(rates.gpu) if rates is not None else None,
            holders=[Holder(int(p.pid), _name(int(p.pid)), int(p.usedGpuMemory or 0)) for p in running],
            events=self._ask("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            repair_pending=bool(rows[2]) if rows is not None else None,
            partitioned=bool(mig[0]) if mig is not None else None,
        )

    def _ask(self, *names: str) -> Any:
        """The answer of the first of these functions that this binding has."""
        function = next((getattr(self._nvml, name) for name in names if hasattr(self._nvml, name)), None)
        try:
            return function(self._handle) if function is not None else None
        except self._nvml.NVMLError:
            return None


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "of another container or user"
