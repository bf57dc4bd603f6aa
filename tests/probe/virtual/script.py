"""Writes a tape by hand, event by event."""

from __future__ import annotations

from autotune.probe.virtual.replay import FIRST_STEP
from autotune.probe.virtual.tape import Kind, Place, Tape, TapeWriter
from autotune.workload.phase import Phase


class Script:
    """What happens, in order. `module` is where everything happens from here on."""

    def __init__(self) -> None:
        self.writer = TapeWriter()
        self.module = ""
        self._sizes: list[int] = []

    def row(self, kind: Kind, ident: int, size: int, op: str = "", place: int = Place.DEVICE, stream: int = 0) -> None:
        names = self.writer.name
        self.writer.rows.append((kind, place, stream, names(op), names(self.module), ident, size))

    def phase(self, phase: Phase, micro_step: int = 1, first: bool = False) -> None:
        """A phase begins; those of the first step are one."""
        self.module = ""
        self.row(Kind.PHASE, micro_step, list(Phase).index(phase), FIRST_STEP if first else str(phase))

    def alloc(self, size: int, place: Place = Place.DEVICE, stream: int = 0, role: str | None = None) -> int:
        """A storage is born; its number is returned."""
        self._sizes.append(size)
        ident = len(self._sizes)
        self.row(Kind.ALLOC, ident, size, "aten::empty", place, stream)
        if role:
            self.writer.roles[ident] = role
        return ident

    def free(self, ident: int) -> None:
        self.row(Kind.FREE, ident, self._sizes[ident - 1])

    def op(
        self, name: str = "aten::mm", flops: int = 0, traffic: int = 0, place: Place = Place.DEVICE, stream: int = 0
    ) -> None:
        self.row(Kind.OP, flops, traffic, name, place, stream)

    def copy(self, size: int, to_device: bool = True, stream: int = 0) -> None:
        self.row(Kind.COPY, int(to_device), size, "aten::copy_", stream=stream)

    def collective(self, name: str, ranks: int, size: int, stream: int = 0) -> None:
        self.row(Kind.COLLECTIVE, ranks, size, f"c10d::{name}", stream=stream)

    def mark(self, kind: Kind, ident: int = 0, stream: int = 0) -> None:
        self.row(kind, ident, 0, stream=stream)

    def tape(self) -> Tape:
        return self.writer.tape()
