"""Memory that creeps: whether a training that fits today would run out of it in a few thousand steps.

A reading is taken after every measured step. A series of readings rises where

- the later two thirds of it do (Mann-Kendall's test, one-sided at 0.05 %): a program that fills its buffers in the
  first steps and then is steady does not creep;
- by more than FLOOR in all: DeepSpeed and Python keep a little of every step for themselves (0.13 MB a step was seen
  at stage 3 with 8 micro-steps), which is no leak of tensors;
- and by more than six times what the readings scatter about the line through them (Theil and Sen's).

Of series that only scatter about one in ten thousand passes for a rising one (tests/probe/test_creep.py).

It matters where what is left would be full within HORIZON steps: many trainings are longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median

from autotune.machine.machine import Machine, gib

FLOOR = 4 * 2**20
"""Bytes."""
HORIZON = 10_000
"""Optimizer steps."""
LEAST = 8
"""Fewer readings than that say nothing."""
_Z = 3.29  # of the normal distribution, one-sided 0.05 %

Steps = Mapping[str, Sequence[int]]
"""Meter → its reading after each measured step (see Meters.after_step), of one rank."""


def at_risk(steps: Sequence[Steps], machine: Machine, used_bytes: int, host_bytes: int) -> str | None:
    """Why a training with this candidate is likely to run out of memory later, one sentence; None where it is not.

    Args:
        steps: of every rank.
        machine: whose memory it is.
        used_bytes: what the worst rank used of its device.
        host_bytes: what the ranks of the fullest node held of its memory.
    """
    for rank, meters in enumerate(steps):
        retries = list(meters.get("retries", []))
        flushes = [after - before for before, after in pairwise(retries) if after > before]
        if len(flushes) >= 2:
            return (
                f"the allocator of rank {rank} had to give its cache back {sum(flushes)} times in "
                f"{len(retries)} steps: memory is too tight, or too fragmented"
            )
    for meter, what in (("device", "device memory"), ("reserved", "reserved device memory")):
        rates = [(rate(meters.get(meter, [])), -rank) for rank, meters in enumerate(steps)]
        fastest, rank = max(rates, default=(0.0, 0))
        left = machine.usable_bytes - used_bytes
        if fastest and left < fastest * HORIZON:
            return _sentence(f"{what} of rank {-rank}", fastest, left)
    for node in range(machine.nodes):
        ranks = steps[node * machine.devices_per_node : (node + 1) * machine.devices_per_node]
        together = sum(rate(meters.get("host", [])) for meters in ranks)
        left = int(machine.host_memory_gib * 2**30) - host_bytes
        if together and machine.host_memory_gib > 0 and left < together * HORIZON:
            return _sentence(f"host memory of node {node}", together, left)
    return None


def rate(sizes: Sequence[int]) -> float:
    """Bytes per step by which a series of readings rises; 0 where it does not."""
    judged = list(sizes[len(sizes) // 3 :])
    n = len(judged)
    if n < LEAST:
        return 0.0
    pairs = list(combinations(range(n), 2))
    rises = sum((judged[j] > judged[i]) - (judged[j] < judged[i]) for i, j in pairs)
    if rises - 1 < min(_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18), len(pairs) - 2):
        return 0.0
    slope = median((judged[j] - judged[i]) / (j - i) for i, j in pairs)
    middle = median(size - slope * i for i, size in enumerate(judged))
    scatter = median(abs(size - slope * i - middle) for i, size in enumerate(judged))
    growth = slope * (n - 1)
    return slope if growth > max(FLOOR, 6 * scatter) else 0.0


def _sentence(what: str, bytes_per_step: float, left: int) -> str:
    left = max(left, 0)
    growing = f"{what} grows by {bytes_per_step / 2**20:.2f} MiB a step"
    return f"{growing}: what is left ({gib(left)}) is full after {left / bytes_per_step:,.0f} steps"
