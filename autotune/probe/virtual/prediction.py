"""What a virtual probe finds: memory per phase and per holder, and whether it fits. Plain data, without torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.workload.phase import Phase


class Verdict(StrEnum):
    """Whether a candidate fits a device's memory."""

    FITS = "fits"  # within what a winner may use
    AT_RISK = "at risk"  # within the device's memory, but not within its headroom
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """One rank's memory in one phase, the worst over the phase's micro-steps. Bytes.

    Attributes:
        allocated: live blocks on the device at the worst moment, each rounded as the allocator rounds it.
        live: the same at the phase's end.
        reserved: the most that the caching allocator held.
        device_total: `reserved` with what is outside of the allocator (context, communication buffers).
        host: host memory of this rank's tensors at the worst moment, pinned included.
        pinned: pinned host memory at the worst moment, as the pinned allocator rounds it.
    """

    allocated: int = 0
    live: int = 0
    reserved: int = 0
    device_total: int = 0
    host: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """What holds memory at the peak of a steady step.

    Attributes:
        kind: parameters, gradients, optimizer state, communication buffers, activations, temporaries, allocator slack
            or outside the allocator.
        name: the module of activations and temporaries (`gpt_neox.layers.*.mlp` for all blocks together; cuBLAS'
            workspaces are temporaries too), else "".
        bytes: held.
        count: how many blocks.
    """

    kind: str
    name: str
    bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class DeviceOom:
    """Where a candidate runs out of device memory.

    Attributes:
        phase: in which.
        module: in which module's forward or backward, "" outside of any.
        requested_bytes: what was asked for.
        allocated_bytes, reserved_bytes: what was live and held then.
    """

    phase: Phase
    module: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One candidate on one rank, as DeepSpeed's own code would allocate it. Bytes and seconds.

    Attributes:
        rank: the worst rank where ranks differ.
        phases: phase (load, init, first_step, forward, backward, step) → memory; the last three of the steady step.
        peak_allocated, peak_reserved: over the steady step.
        steady_allocated: between two optimizer steps.
        device_total: the most that the device had in use in any phase, context and communication buffers included.
        retries: how often the allocator had to give its cache back to serve a request.
        verdict: by the machine's memory and headroom.
        oom: where it ran out of device memory, None where it did not.
        host_per_node: host memory of all ranks of a node at the worst moment, pinned included.
        host_oom: whether that is more than the node has.
        holders: what holds the device's memory at the peak of the steady step, the largest first.
        step_s: a whole optimizer step by the plain roofline, with accumulation in full.
        ranks: rank → peak allocated, for the ranks that were traced.
    """

    rank: int
    phases: dict[str, PhaseMemory]
    peak_allocated: int
    peak_reserved: int
    steady_allocated: int
    device_total: int
    retries: int
    verdict: Verdict
    oom: DeviceOom | None
    host_per_node: int
    host_oom: bool
    holders: list[Holder] = field(default_factory=list)
    step_s: float = 0.0
    ranks: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)
