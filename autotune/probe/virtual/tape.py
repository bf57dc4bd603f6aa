"""The tape: everything that happened to memory and devices in one rank, in order, as columns of numbers.

A tape is written once, by a recorder in a process that has torch, and read by analyses that do not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """What an event is; what its `ident` and `size` mean."""

    ALLOC = 0  # a storage is born: its number, bytes as asked for
    FREE = 1  # it is gone: its number, 0
    OP = 2  # a kernel: floating-point operations, bytes read and written
    COPY = 3  # between host and device: 1 to the device or 0 to the host, bytes
    COLLECTIVE = 4  # ranks of its group, bytes that this rank holds of the whole
    RECORD_STREAM = 5  # a storage is used on another stream too: its number, 0
    EVENT_RECORD = 6  # an event is put behind the work of a stream: its number, 0
    EVENT_WAIT = 7  # a stream waits for an event: its number, 0
    SYNCHRONIZE = 8  # the host waits for a stream: 1 for all streams, 0
    EMPTY_CACHE = 9  # the allocator is told to give back what it caches
    PHASE = 10  # a phase begins: micro-step, index of its Phase; `op` is its name, or that of the first step


class Place(IntEnum):
    """Which memory a storage lies in."""

    DEVICE = 0
    HOST = 1
    PINNED = 2


COLUMNS: dict[str, Any] = {
    "kind": np.uint8,
    "place": np.uint8,
    "stream": np.int16,
    "op": np.int32,
    "module": np.int32,
    "ident": np.int64,
    "size": np.int64,
}
Row = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class Tape:
    """One rank's run: its events, one row each.

    Attributes:
        rows: a structured array with the columns of COLUMNS; `op` and `module` are indices into `names`.
        names: names of operations, phases and modules ("" for outside of any module).
        roles: storage → what it is to DeepSpeed (parameters, gradients, optimizer state, communication buffers).
        facts: what else is known of the run, as plain JSON.
    """

    rows: NDArray[Any]
    names: list[str]
    roles: dict[int, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the tape as one compressed file."""
        text = json.dumps({"names": self.names, "roles": sorted(self.roles.items()), "facts": self.facts})
        columns: dict[str, NDArray[Any]] = {name: self.rows[name] for name in COLUMNS}
        columns["text"] = np.frombuffer(text.encode(), dtype=np.uint8)
        np.savez_compressed(path, **columns)  # type: ignore[arg-type] # numpy's stub takes them for its flag

    @classmethod
    def load(cls, path: Path) -> Tape:
        """The tape that `save` wrote.

        Raises:
            OSError: there is none, or it cannot be read.
            ValueError: it is not whole.
        """
        try:
            with path.open("rb") as whole, np.load(whole, allow_pickle=False) as file:
                text = json.loads(file["text"].tobytes())
                rows = np.empty(len(file["kind"]), dtype=list(COLUMNS.items()))
                for name in COLUMNS:
                    rows[name] = file[name]
            return cls(rows, text["names"], dict(text["roles"]), text["facts"])
        except OSError:
            raise
        except Exception as error:  # numpy, zipfile, zlib and json each have their own
            raise ValueError(f"{path} is no whole tape: {error}") from error


class TapeWriter:
    """Takes events as they happen. Appending a tuple is all that it costs."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.roles: dict[int, str] = {}
        self.facts: dict[str, Any] = {}
        self._names: dict[str, int] = {"": 0}
        self._stopped: list[Row] | None = None

    def name(self, text: str) -> int:
        """The index of a name."""
        return self._names.setdefault(text, len(self._names))

    def text(self, index: int) -> str:
        """The name at an index."""
        return next(text for text, known in self._names.items() if known == index)

    def stop(self) -> None:
        """Take nothing more: what still comes is only the unwinding of what was stopped."""
        if self._stopped is None:
            self._stopped, self.rows = self.rows, []

    def tape(self) -> Tape:
        """What was written so far."""
        rows = np.array(self.rows if self._stopped is None else self._stopped, dtype=list(COLUMNS.items()))
        return Tape(rows, list(self._names), dict(self.roles), dict(self.facts))
