"""What a probe returns: outcome, phase, memory, time, versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.workload.phase import Phase


class Outcome(StrEnum):
    """How a probe ended. All but `infra` say something about the candidate."""

    OK = "ok"
    STOPPED = "stopped"  # ended early because it could not win
    OOM_DEVICE = "oom_device"
    OOM_HOST = "oom_host"
    INVALID = "invalid"  # DeepSpeed refused the configuration
    DIVERGED = "diverged"  # the loss is not finite, or every step was skipped
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INFRA = "infra"  # our trouble: retried, and teaches the search nothing

    @property
    def is_oom(self) -> bool:
        """Whether memory ran out, on the device or on the host."""
        return self in (Outcome.OOM_DEVICE, Outcome.OOM_HOST)

    @property
    def measured_memory(self) -> bool:
        """Whether the probe got as far as a whole optimizer step, so that its peaks are those of training."""
        return self in (Outcome.OK, Outcome.STOPPED)


REUSABLE = frozenset({Outcome.OK, Outcome.OOM_DEVICE, Outcome.OOM_HOST, Outcome.INVALID})
"""Outcomes that another study may take over when everything that matters is equal."""


VIRTUAL = "virtual"
"""The kind of a prober that predicts: what it returns is planned, and is never mixed with what was measured."""

PLANNED = "planned, not measured"
"""How that is marked wherever it is shown or written."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate, measured or predicted. Bytes, seconds and tokens/s; ranks differ, so peaks are the worst rank's.

    Attributes:
        tokens_per_s: global tokens over the wall clock of whole optimizer steps, median over the measured steps;
            for `stopped` the upper bound that was not enough.
        tokens_per_s_low, tokens_per_s_high: the spread, the 95 % confidence interval of that median.
        step_s: the median optimizer step.
        step_times_s: every measured step, in order.
        peak_allocated_bytes: live tensors on the device at the worst moment of a steady step.
        peak_reserved_bytes: what the allocator held then (equal to allocated where nothing caches, as on CPU).
        device_total_bytes: all that the device had in use, context and communication buffers included.
        needed_bytes: for an OOM, a lower bound of what it would have taken, where the failure told.
        host_peak_bytes: what the ranks of the fullest node and their children held of its memory at once, shared pages
            counted once, pinned memory included; `detail["host_bytes"]` has every node's.
        memory: phase → list over ranks of that rank's meters (see autotune/probe/torchrun/meters.py).
        losses: the loss of every optimizer step in order, the mean over its micro-steps and over the ranks.
        gradient_norms: the norm of the gradients of every optimizer step, before clipping; None where DeepSpeed keeps
            none.
        at_risk: why a training with this candidate is likely to run out of memory later, one sentence; found in
            confirmations (see creep.py).
        overhead_s: `wall_s` less warm-up, tape and measured steps.
        environment: threads, placement, allocator settings and versions in effect.
        detail: whatever else a person debugging would want (exception, log paths, exit codes).
    """

    outcome: Outcome
    probe_kind: str
    phase: Phase | None = None
    message: str | None = None
    tokens_per_s: float | None = None
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    step_s: float | None = None
    step_times_s: list[float] = field(default_factory=list)
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    worst_rank: int | None = None
    needed_bytes: int | None = None
    host_peak_bytes: int | None = None
    skipped_steps: int = 0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float | None] = field(default_factory=list)
    memory: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    at_risk: str | None = None
    wall_s: float = 0.0
    overhead_s: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def predicted(self) -> bool:
        """Whether nothing was run: every figure comes from devices that do not exist."""
        return self.probe_kind == VIRTUAL

    @property
    def used_bytes(self) -> int | None:
        """What counts against the device's memory: the device's own total where known, else reserved."""
        known = [b for b in (self.device_total_bytes, self.peak_reserved_bytes, self.peak_allocated_bytes) if b]
        return known[0] if known else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """The measurement that `to_dict` wrote.

        Raises:
            TypeError, ValueError: the mapping was not written by this version.
        """
        known = dict(values)
        known["outcome"] = Outcome(known["outcome"])
        known["phase"] = Phase(known["phase"]) if known.get("phase") else None
        return cls(**known)
