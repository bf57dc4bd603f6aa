"""Plays a tape through the allocator and the host's memory: peaks by phase, where it runs out, who holds what."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autotune.machine.machine import Machine
from autotune.probe.virtual.allocator import MIN_BLOCK, AllocatorSettings, CachingAllocator, DeviceOutOfMemory
from autotune.probe.virtual.prediction import DeviceOom, Holder, PhaseMemory
from autotune.probe.virtual.tape import Kind, Place, Tape
from autotune.workload.phase import Phase

FIRST_STEP = "first_step"
STEADY = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
MIB = 2**20
_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_grouped_mm", "aten::addmv")
_WORKSPACE = 1 << 60
"""Numbers from here on are cuBLAS workspaces, which are on no tape."""


@dataclass
class Replayed:
    """What one rank's tape comes to. Bytes.

    Attributes:
        phases: load, init, first_step, forward, backward, step → memory.
        peak_allocated, peak_reserved: over the steady step.
        steady_allocated: at the end of the steady step.
        device_total: the most reserved in any phase, with what is outside of the allocator.
        retries: cache flushes.
        oom: where the device's memory ran out; what follows is then unknown.
        host, pinned: the most in any phase, of this rank.
        holders: at the peak of the steady step, or when the request came that did not fit.
    """

    phases: dict[str, PhaseMemory] = field(default_factory=dict)
    peak_allocated: int = 0
    peak_reserved: int = 0
    steady_allocated: int = 0
    device_total: int = 0
    retries: int = 0
    oom: DeviceOom | None = None
    host: int = 0
    pinned: int = 0
    holders: list[Holder] = field(default_factory=list)


def outside_bytes(machine: Machine) -> int:
    """What a device holds outside of the allocator: the context, and NCCL's buffers where ranks communicate."""
    nccl = machine.nccl_mib if machine.world_size > 1 else 0
    return int((machine.context_mib + nccl) * MIB)


def pinned_bytes(size: int) -> int:
    """A pinned buffer as torch's pinned allocator makes it: the next power of two (CachingHostAllocatorImpl.h)."""
    return 1 << (size - 1).bit_length() if size else 0


def replay(tape: Tape, machine: Machine, settings: AllocatorSettings) -> Replayed:
    """Play a tape on a device of a machine.

    Where memory runs out the replay ends, and what is known up to there is returned.
    """
    player = _Player(tape, machine, settings)
    player.play()
    return player.result


class _Plain:
    """Memory that nothing caches and nothing rounds, as on an emulated device."""

    retries = 0

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.allocated = self.peak_allocated = self.peak_reserved = 0
        self._sizes: dict[int, int] = {}

    def malloc(self, ident: int, size: int, stream: int = 0) -> None:
        if self.allocated + size > self._capacity:
            raise DeviceOutOfMemory(size, size, self.allocated, self.allocated)
        self._sizes[ident] = size
        self.allocated += size
        self.peak_allocated = self.peak_reserved = max(self.peak_allocated, self.allocated)

    def free(self, ident: int) -> None:
        self.allocated -= self._sizes.pop(ident)

    def reset_peaks(self) -> None:
        self.peak_allocated = self.peak_reserved = self.allocated

    @property
    def reserved(self) -> int:
        return self.allocated

    def record_stream(self, ident: int, stream: int) -> None:
        pass

    def synchronize(self, stream: int | None = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class _Player:
    def __init__(self, tape: Tape, machine: Machine, settings: AllocatorSettings) -> None:
        self.tape = tape
        self.outside = outside_bytes(machine)
        capacity = machine.device_memory_bytes - self.outside
        caches = machine.accelerator != "cpu"
        self.allocator: CachingAllocator | _Plain = CachingAllocator(capacity, settings) if caches else _Plain(capacity)
        self.block = MIN_BLOCK if caches else 1
        self.workspace = int(machine.cublas_workspace_mib * MIB)
        self.matmuls = {i for i, name in enumerate(tape.names) if name.partition(".")[0] in _MATMULS}
        self.result = Replayed()
        self.phase = ""
        self.host = self.pinned = self.host_peak = self.pinned_peak = 0
        self.workspaces: set[tuple[bool, int]] = set()
        self.peak_row = self.peak_workspaces = self.held = 0
        self.peak = -1

    def play(self) -> None:
        """Play all events, or up to where memory runs out."""
        row = 0
        try:
            row = self._events()
        except DeviceOutOfMemory as error:
            row = self.row
            names = self.tape.names
            phase = Phase(self.phase) if self.phase in set(Phase) else Phase(self.within)
            self.result.oom = DeviceOom(
                phase,
                names[int(self.tape.rows["module"][row])],
                error.requested_bytes,
                error.allocated_bytes,
                error.reserved_bytes,
            )
            self._peaked(row - 1)
        self._close()
        self.result.retries = self.allocator.retries
        self.result.holders = self._holders()
        for phase in STEADY:
            memory = self.result.phases.get(phase, PhaseMemory())
            self.result.peak_allocated = max(self.result.peak_allocated, memory.allocated)
            self.result.peak_reserved = max(self.result.peak_reserved, memory.reserved)
        every = self.result.phases.values()
        self.result.steady_allocated = self.allocator.allocated
        self.result.device_total = max((memory.device_total for memory in every), default=0)
        self.result.host = max((memory.host for memory in every), default=0)
        self.result.pinned = max((memory.pinned for memory in every), default=0)

    def _events(self) -> int:
        tape, allocator, names = self.tape, self.allocator, self.tape.names
        malloc, free = allocator.malloc, allocator.free
        places: dict[int, int] = {}
        on_host = {i for i, name in enumerate(names) if name == "aten::_local_scalar_dense"}
        index = 0
        for index, (kind, place, stream, op, _module, ident, size) in enumerate(tape.rows.tolist()):
            if kind == Kind.ALLOC:
                if place == Place.DEVICE:
                    self.row = index
                    malloc(ident, size, stream)
                    if self.steady and allocator.allocated > self.peak:
                        self._peaked(index)
                else:
                    places[ident] = place
                    self._on_host(place, size)
            elif kind == Kind.FREE:
                if ident in places:
                    self._on_host(places.pop(ident), -size)
                else:
                    free(ident)
            elif kind == Kind.OP:
                if op in self.matmuls and place == Place.DEVICE and self.workspace:
                    # one for each handle, and the thread that runs backward has a handle of its own
                    key = (self.within == Phase.BACKWARD, stream)
                    if key not in self.workspaces:
                        self.row = index
                        malloc(_WORKSPACE + len(self.workspaces), self.workspace, stream)
                        self.workspaces.add(key)
                        if self.steady and allocator.allocated > self.peak:
                            self._peaked(index)
                elif op in on_host:
                    allocator.synchronize(stream)
            elif kind == Kind.PHASE:
                self._close()
                self.phase, self.within = names[op], (list(Phase)[size] if names[op] == FIRST_STEP else names[op])
                self.steady = self.phase in STEADY
                allocator.reset_peaks()
                if self.steady and allocator.allocated > self.peak:
                    self._peaked(index)
                self.host_peak, self.pinned_peak = self.host, self.pinned
            elif kind == Kind.RECORD_STREAM:
                if ident not in places:
                    allocator.record_stream(ident, stream)
            elif kind == Kind.EVENT_WAIT:
                # When work is done is not on a tape without time. Here everything counts as done where one stream
                # waits for another: on four GH200 that reserves 3 % less (ZeRO-3) and 5 % more (ZeRO-1) than was
                # measured; leaving it to the host's waits alone, 57 % more.
                allocator.synchronize(None)
            elif kind == Kind.SYNCHRONIZE:
                allocator.synchronize(None if ident else stream)
            elif kind == Kind.EMPTY_CACHE:
                allocator.empty_cache()
        return index

    steady = False
    within: str = ""
    row = 0

    def _peaked(self, row: int) -> None:
        """Remember the moment after a row, of which it is to be said who holds what."""
        self.peak, self.held = self.allocator.allocated, self.allocator.reserved
        self.peak_row, self.peak_workspaces = row, len(self.workspaces)

    def _holders(self) -> list[Holder]:
        found = holders(self.tape, self.peak_row, self.block)
        size = -(-self.workspace // MIN_BLOCK) * MIN_BLOCK
        if self.peak_workspaces:
            found.append(Holder("temporaries", "cuBLAS workspace", self.peak_workspaces * size, self.peak_workspaces))
        slack = self.held - sum(holder.bytes for holder in found)  # cached, or the rest of a block that is not split
        if slack > 0:
            found.append(Holder("allocator slack", "", slack))
        if self.outside:
            found.append(Holder("outside the allocator", "", self.outside))
        return sorted(found, key=lambda holder: -holder.bytes)

    def _on_host(self, place: int, size: int) -> None:
        if place == Place.PINNED:
            size = pinned_bytes(size) if size > 0 else -pinned_bytes(-size)
            self.pinned += size
            self.pinned_peak = max(self.pinned_peak, self.pinned)
        self.host += size
        self.host_peak = max(self.host_peak, self.host)

    def _close(self) -> None:
        """Keep what the phase that ends came to, the worst over its micro-steps."""
        if not self.phase:
            return
        allocator, kept = self.allocator, self.result.phases.get(self.phase, PhaseMemory())
        reserved = allocator.peak_reserved
        self.result.phases[self.phase] = PhaseMemory(
            allocated=max(kept.allocated, allocator.peak_allocated),
            live=allocator.allocated,
            reserved=max(kept.reserved, reserved),
            device_total=max(kept.device_total, reserved + self.outside),
            host=max(kept.host, self.host_peak),
            pinned=max(kept.pinned, self.pinned_peak),
        )


def holders(tape: Tape, row: int, block: int) -> list[Holder]:
    """What is live on the device just after a row of a tape, by what it is; sizes are rounded up to `block` bytes."""
    rows = tape.rows[: row + 1]
    born = rows[(rows["kind"] == Kind.ALLOC) & (rows["place"] == Place.DEVICE)]
    dead = np.isin(born["ident"], rows["ident"][rows["kind"] == Kind.FREE])
    phase_rows = np.flatnonzero(rows["kind"] == Kind.PHASE)
    positions = np.flatnonzero((rows["kind"] == Kind.ALLOC) & (rows["place"] == Place.DEVICE))[~dead]
    where = np.searchsorted(phase_rows, positions, side="right") - 1
    forward = list(Phase).index(Phase.FORWARD)
    sums: dict[tuple[str, str], list[int]] = {}
    for position, at in zip(positions.tolist(), where.tolist(), strict=True):
        _, _, _, _, module, ident, size = rows[position].tolist()
        name = ""
        kind = tape.roles.get(ident)
        if kind is None:
            kind = "activations" if at >= 0 and rows["size"][phase_rows[at]] == forward else "temporaries"
            name = erased(tape.names[module])
        entry = sums.setdefault((kind, name), [0, 0])
        entry[0] += -(-size // block) * block
        entry[1] += 1
    return [Holder(kind, name, size, count) for (kind, name), (size, count) in sums.items()]


def erased(module: str) -> str:
    """A module's name with the numbers of its blocks erased, so that all blocks are one: `layers.*.mlp`."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))
