"""Where training runs: nodes × devices, their memory and bandwidths. Plain data, readable by every process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30


def gib(size: int) -> str:
    """Bytes as `12.34 GiB`; below 1 GiB with three digits after the point."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB or size == 0 else f"{size / GIB:.3f} GiB"


@dataclass
class Machine:
    """A cluster of equal nodes.

    Attributes:
        name: of the config, e.g. `a100_80g`.
        accelerator: `cpu` or `cuda` (AMD's devices are `cuda` to torch).
        device: the product name as the driver gives it; for `cpu` the processor's.
        nodes, devices_per_node: how many; a rank runs on each device.
        device_memory_gib: memory of one device that torch can use, GiB.
        headroom: the share of device memory that a winner must leave free.
        host_memory_gib: memory of one node, GiB.
        cores: processor cores of one node.
        memory_bandwidth_gb_s: of one device, 1e9 bytes/s.
        peak_tflops: dense peak by precision (fp32, tf32, fp16, bf16), 1e12 operations/s.
        intra_node_gb_s: between two devices of a node, one direction, 1e9 bytes/s per device.
        inter_node_gb_s: between nodes, one direction, 1e9 bytes/s per device.
        host_link_gb_s: between a device and its host's memory, one direction, 1e9 bytes/s.
        driver: version of the device's driver where the machine is the one here.
        context_mib: what the driver and the kernels of one process take of a device, MiB.
        cublas_workspace_mib: what torch allocates for cuBLAS at a stream's first matrix product, MiB.
        nccl_mib: NCCL's buffers on a device, for the communicators that DeepSpeed opens over all ranks, MiB.
    """

    name: str = "???"
    accelerator: str = "cuda"
    device: str = ""
    nodes: int = 1
    devices_per_node: int = 8
    device_memory_gib: float = 0.0
    headroom: float = 0.05
    host_memory_gib: float = 0.0
    cores: int = 0
    memory_bandwidth_gb_s: float = 0.0
    peak_tflops: dict[str, float] = field(default_factory=dict)
    intra_node_gb_s: float = 0.0
    inter_node_gb_s: float = 0.0
    host_link_gb_s: float = 0.0
    driver: str = ""
    context_mib: float = 0.0
    cublas_workspace_mib: float = 0.0
    nccl_mib: float = 0.0

    @property
    def world_size(self) -> int:
        """Devices in all: the data-parallel size."""
        return self.nodes * self.devices_per_node

    @property
    def device_memory_bytes(self) -> int:
        """Memory of one device, bytes."""
        return int(self.device_memory_gib * GIB)

    @property
    def usable_bytes(self) -> int:
        """What a winner may use of one device's memory, bytes."""
        return int(self.device_memory_bytes * (1 - self.headroom))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Machine:
        """The machine that `to_dict` wrote."""
        return cls(**values)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that are equal exactly when measurements on two machines may be compared as one's.

        Headroom is left out: it decides who wins, not what is measured.
        """
        record = {name: value for name, value in self.to_dict().items() if name != "headroom"}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
