"""What the ranks of one probe hold of their node's memory, and the guard that ends them before the kernel ends others.

Use is the sum over the node's ranks and their children (DataLoader workers) of their resident memory with shared
pages shared out. It is read while the probe runs, but only where resident memory, which costs nothing to ask for, has
grown: in steady steps nothing is read that could slow them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from autotune.machine.machine import GIB, gib
from autotune.probe.torchrun.procfs import available_bytes, everyone_resident, pss_bytes, resident_bytes

GROWN = 4 * 2**20
"""Shared pages are counted anew when resident memory has grown by so many bytes, and by a hundredth."""
SHARE = 50
"""Counting takes at most this part of the time (1/50): of very large processes it takes tenths of a second."""
FAMILY_S = 2.0
"""The children of ranks are looked for so often, seconds: it means a look at every process."""


@dataclass(frozen=True, slots=True)
class HostFull:
    """That a node's memory ran out, or was about to.

    Attributes:
        ours: the probe took it; else someone else did, and that says nothing about the candidate.
        message: one sentence.
        rank: the one that grew most; None where it was not ours.
        needed_bytes: what the node's ranks held then, a lower bound of what they need.
    """

    ours: bool
    message: str
    rank: int | None = None
    needed_bytes: int | None = None


class HostMemory:
    """Watches the ranks of one probe on one node.

    Args:
        limit_bytes: what the ranks of a node may hold: the memory that the machine's settings give a node.
        reserve_bytes: when less than that is available, the ranks must end.
        available: bytes that processes here can still have.

    Attributes:
        peak_bytes: the most that the ranks held together.
        full: set once the ranks must end.
    """

    def __init__(self, limit_bytes: int, reserve_bytes: int, available: Callable[[], int] = available_bytes) -> None:
        self._limit, self._reserve, self._available = limit_bytes, reserve_bytes, available
        self._began_with = available()
        self._others = everyone_resident()
        self._first: dict[int, int] = {}
        self._families: dict[int, list[int]] = {}
        self._families_at = self._counted_at = float("-inf")
        self._counted = 0
        self._took = 0.0
        self.peak_bytes = 0
        self.full: HostFull | None = None

    def look(self, ranks: Mapping[int, int]) -> bool:
        """Whether the ranks must be ended now. Call it every tenth of a second: a rank can take gigabytes a second.

        Args:
            ranks: rank → process, of those that are running here.
        """
        if self.full is not None or not ranks:
            return self.full is not None
        now = time.monotonic()
        if now > self._families_at + FAMILY_S or ranks.keys() != self._families.keys():
            self._families = {rank: family(pid) for rank, pid in ranks.items()}
            self._families_at = now
        held = {rank: sum(map(resident_bytes, self._families.get(rank, [pid]))) for rank, pid in ranks.items()}
        for rank, size in held.items():
            self._first.setdefault(rank, size)
        resident = sum(held.values())
        if resident > self._counted * 1.01 + GROWN and now > self._counted_at + SHARE * self._took:
            self._count(ranks, now)
            self._counted = resident
        left = self._available()
        if left < self._reserve or 0 < self._limit < self.peak_bytes:
            self.peak_bytes += max(resident - self._counted, 0)  # since shared pages were last counted
            self._families = {rank: family(pid) for rank, pid in ranks.items()}  # children born since are ours too
            self.full = self._judge(held, left)
        return self.full is not None

    def report(self) -> dict[str, Any]:
        """What was seen, as plain JSON types."""
        return {"peak_bytes": self.peak_bytes, "full": asdict(self.full) if self.full else None}

    def _count(self, ranks: Mapping[int, int], now: float) -> None:
        pids = {pid for rank, first in ranks.items() for pid in self._families.get(rank, [first])}
        self.peak_bytes = max(self.peak_bytes, sum(map(pss_bytes, pids)))
        self._counted_at = time.monotonic()
        self._took = self._counted_at - now

    def _judge(self, held: Mapping[int, int], left: int) -> HostFull:
        """Whose doing it is that memory is short, and the sentence that says so."""
        grown = {rank: size - self._first[rank] for rank, size in held.items()}
        rank = max(grown, key=lambda r: grown[r])
        if left >= self._reserve:
            return HostFull(
                ours=True,
                rank=rank,
                needed_bytes=self.peak_bytes,
                message=f"the ranks hold {gib(self.peak_bytes)} of host memory, and a node has {gib(self._limit)} "
                "(machine.host_memory_gib)",
            )
        # Pinned memory of the ranks is in nobody's resident memory: only what others are seen to have taken is theirs.
        ours = {pid for members in self._families.values() for pid in members}
        now = {pid: size for pid, size in everyone_resident().items() if pid not in ours}
        others = sum(size - self._others.get(pid, 0) for pid, size in now.items())
        taken = self._began_with - left
        state = f"{gib(left)} of host memory is left, and probe.host_reserve_gib keeps {gib(self._reserve)}"
        if self._began_with < self._reserve or others > taken / 2:
            return HostFull(ours=False, message=f"the host's memory is full with someone else's work: {state}")
        message = f"rank {rank} grew by {gib(grown[rank])}: {state}"
        return HostFull(ours=True, rank=rank, needed_bytes=self.peak_bytes, message=message)


def held_by_nodes(
    memory: Mapping[str, Sequence[Mapping[str, Any]]], nodes: int, devices_per_node: int, watched: Sequence[int]
) -> list[int]:
    """The most host memory that the ranks of each node held, pinned memory included, bytes.

    Args:
        memory: phase → its meters of every rank.
        nodes: of the machine.
        devices_per_node: of the machine.
        watched: of each node, what was seen from outside: the moments between phases, and the children of ranks, but
            no pinned memory.
    """
    seen = []
    for node in range(nodes):
        phases = [[m for m in ranks if m["rank"] // devices_per_node == node] for ranks in memory.values()]
        pinned = [sum(m.get("pinned", 0) for m in ranks) for ranks in phases]
        within = [sum(m.get("pss", 0) for m in ranks) for ranks in phases]
        outside = watched[node] if node < len(watched) else 0
        both = [p + w for p, w in zip(pinned, within, strict=True)]
        seen.append(max([outside + max(pinned, default=0), *both]))
    return seen


def reserve_bytes(size_gib: float | None) -> int:
    """`probe.host_reserve_gib` in bytes, or its default: 2 % of the host's memory, but 0.5 GiB at least and 8 at most.

    The ranks of a node can touch some 20 GB/s together and are looked at every tenth of a second: they take at most a
    few GiB before they are gone. What is kept on a small host is for the tuner itself and the kernel.
    """
    if size_gib is not None:
        return int(size_gib * GIB)
    return int(min(max(psutil.virtual_memory().total * 0.02, GIB // 2), 8 * GIB))


def family(pid: int) -> list[int]:
    """A process and all that descends from it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]
