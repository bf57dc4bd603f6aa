"""Tapes as texts that can be compared: a hash for what each row is, numbers for what it refers to."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.probe.virtual.tape import Kind, Tape

_NUMBERED = (Kind.ALLOC, Kind.FREE, Kind.RECORD_STREAM, Kind.EVENT_RECORD, Kind.EVENT_WAIT)  # `ident` is a birth number
IDENT, SIZE, MODULE = range(3)  # columns of Text.values

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class NotExtendable(Exception):
    """Raised when two tapes do not show how a deeper model's goes on."""


class Names:
    """The names of two tapes: modules of blocks stand block by block in the order of the model, all others are equal.

    Args:
        shallow, deeper: the names on the two tapes.
        blocks: the name of the list of blocks.
    """

    def __init__(self, shallow: list[str], deeper: list[str], blocks: str) -> None:
        self._pattern = re.compile(rf"{re.escape(blocks)}\.(\d+)(?=\.|$)")
        self._blocks, self._names = blocks, deeper
        self._numbers: dict[str, int] = {}
        numbers = np.array([self.split(name)[1] for name in deeper])
        few = max((self.split(name)[1] for name in shallow), default=-1) + 1
        self.period = int(numbers.max(initial=-1)) + 1 - few
        inside = np.flatnonzero(numbers >= few)
        if not len(inside) or not few:
            raise NotExtendable(f"the deeper tape has no more {blocks} than the shallow one")
        self._start, self._end = int(inside[0]), int(inside[-1]) + 1
        if deeper[: self._start] + deeper[self._end :] != shallow:
            raise NotExtendable("the two tapes name other operations or modules, or in another order")

    def split(self, name: str) -> tuple[str, int]:
        """(the name without its block's number, that number or -1)."""
        found = self._pattern.match(name)
        return (name, -1) if found is None else (f"{self._blocks}.#{name[found.end() :]}", int(found[1]))

    def number(self, text: str) -> int:
        """One number for each text."""
        return self._numbers.setdefault(text, len(self._numbers))

    def templates(self, names: list[str]) -> Ints:
        """A number for each name, equal for the same module of different blocks."""
        return np.array([self.number(self.split(name)[0]) for name in names], dtype=np.int64)

    def extended(self, copies: int) -> list[str]:
        """The names on the tape of the deeper model that is wanted."""
        added = []
        for copy in range(1, copies + 1):
            for name in self._names[self._start : self._end]:
                template, block = self.split(name)
                added.append(template.replace("#", str(block + copy * self.period), 1))
        return self._names[: self._end] + added + self._names[self._end :]

    def moved(self, index: NDArray[Any], copies: int) -> NDArray[Any]:
        """Where names of the deeper tape are among the extended ones."""
        return np.where(index < self._end, index, index + copies * (self._end - self._start))


class Text:
    """A tape as two hashes per row, and the numbers that may differ from copy to copy.

    Attributes:
        strict: equal where two rows are, except for numbers of storages, events and blocks.
        lax: equal also where sizes and floating-point operations differ, as they may outside of blocks.
        values: storage or event number (or what else `ident` is), size, index of the module's name.
        template: the module's name without its block's number, as a number.
        role: of the storage that is born, an index into `roles`; 0 for none.
    """

    def __init__(self, tape: Tape, names: Names) -> None:
        rows = tape.rows
        self.template = names.templates(tape.names)[rows["module"]]
        self.roles = ["", *sorted(set(tape.roles.values()))]
        born = np.flatnonzero(rows["kind"] == Kind.ALLOC)
        known = np.zeros(len(born) + 1, dtype=np.int64)
        if not np.array_equal(rows["ident"][born], np.arange(1, len(born) + 1)):
            raise NotExtendable("storages are not numbered as they are born")
        for ident, role in tape.roles.items():
            known[ident] = self.roles.index(role)
        self.role = np.zeros(len(rows), dtype=np.int64)
        self.role[born] = known[1:]
        said = np.array([names.number(f"role {role}") for role in self.roles])[self.role]
        op = np.array([names.number(f"op {name}") for name in tape.names])[rows["op"]]
        amount = np.where(np.isin(rows["kind"], _NUMBERED), 0, rows["ident"])
        of_block = np.array([names.split(name)[1] >= 0 for name in tape.names])[rows["module"]]
        inside = hashed(amount, rows["size"]) * of_block
        self.lax = hashed(rows["kind"], rows["place"], rows["stream"], op, self.template, said, inside)
        self.strict = hashed(self.lax, amount, rows["size"])
        columns = (rows["ident"], rows["size"], rows["module"])
        self.values: Ints = np.stack([column.astype(np.int64) for column in columns], axis=1)


def hashed(*columns: NDArray[Any]) -> Hashes:
    """One hash for each row of some columns."""
    mixed = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed
