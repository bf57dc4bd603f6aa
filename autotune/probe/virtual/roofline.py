"""How long a step takes by the plain roofline: nothing overlaps but streams, and everything runs at its nominal rate.

It ranks candidates, and promises nothing. A time model will take its place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.machine.machine import Machine
from autotune.probe.virtual.tape import Kind, Place, Tape
from autotune.workload.phase import Phase

HOST_MEMORY_GB_S = 25.0
"""Of one rank's share of its host's memory, 1e9 bytes/s: an estimate, a node's 200 GB/s shared by eight ranks."""


def step_seconds(tape: Tape, machine: Machine, precision: str, accumulation: int) -> float:
    """Seconds of one steady optimizer step.

    Args:
        tape: of a run whose steps have 1 micro-step, or 2 where the accumulation is above 1.
        machine: gives the rates.
        precision: of the matrix products.
        accumulation: micro-steps of the step that is asked for.
    """
    rows = tape.rows
    seconds = np.zeros(len(rows))
    kind, place = rows["kind"], rows["place"]
    peak = machine.peak_tflops.get(precision) or machine.peak_tflops.get("fp32") or 1.0
    bandwidth = machine.memory_bandwidth_gb_s or HOST_MEMORY_GB_S
    on_device = (kind == Kind.OP) & (place == Place.DEVICE)
    seconds[on_device] = np.maximum(
        rows["ident"][on_device] / (peak * 1e12), rows["size"][on_device] / (bandwidth * 1e9)
    )
    on_host = (kind == Kind.OP) & (place != Place.DEVICE)
    seconds[on_host] = rows["size"][on_host] / (HOST_MEMORY_GB_S * 1e9)
    copies = kind == Kind.COPY
    seconds[copies] = rows["size"][copies] / ((machine.host_link_gb_s or HOST_MEMORY_GB_S) * 1e9)
    collectives = kind == Kind.COLLECTIVE
    seconds[collectives] = _collective_seconds(tape, machine, collectives)

    begins = np.flatnonzero(kind == Kind.PHASE)
    steady = [at for at in begins if tape.names[rows["op"][at]] in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)]
    if not steady:
        return 0.0
    micro_steps = int(rows["ident"][steady].max())
    starts = [at for at in steady if tape.names[rows["op"][at]] == Phase.FORWARD] + [len(rows)]
    times = [_busiest(seconds[a:b], rows["stream"][a:b]) for a, b in pairwise(starts)]
    if micro_steps == 1:
        return times[0]
    return (accumulation - 1) * times[0] + times[-1]


def _busiest(seconds: NDArray[Any], streams: NDArray[Any]) -> float:
    """What is given to one stream follows one another; streams run side by side."""
    return float(np.bincount(streams.astype(np.int64), weights=seconds).max()) if len(seconds) else 0.0


def _collective_seconds(tape: Tape, machine: Machine, where: NDArray[Any]) -> NDArray[Any]:
    """Rings: each rank passes on (n − 1)/n of the message, twice for an all-reduce."""
    ranks, sizes = tape.rows["ident"][where], tape.rows["size"][where]
    rates = np.where(ranks > machine.devices_per_node, machine.inter_node_gb_s, machine.intra_node_gb_s)
    rates = np.where(rates > 0, rates, HOST_MEMORY_GB_S)
    twice = np.array(["allreduce" in name for name in tape.names])[tape.rows["op"][where]]
    seconds: NDArray[Any] = (1 + twice) * sizes * (ranks - 1) / np.maximum(ranks, 1) / (rates * 1e9)
    return seconds
