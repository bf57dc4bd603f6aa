"""Tapes of other micro-batches: each allocation grows affinely with the micro-batch, so two traces give all of them."""

from __future__ import annotations

import numpy as np

from autotune.probe.virtual.tape import Kind, Tape

_SCALED = (Kind.OP, Kind.COPY, Kind.COLLECTIVE, Kind.ALLOC, Kind.FREE)


class NotAffineError(Exception):
    """Raised when two tapes are not the same program with other sizes."""


def at_micro_batch(one: Tape, two: Tape, micro_batches: tuple[int, int], wanted: int) -> Tape:
    """The tape at a third micro-batch, from two.

    Holds where accumulation is 1 in all three, or above 1 in all three.

    Args:
        one: the tape at one micro-batch.
        two: the tape at another.
        micro_batches: those two.
        wanted: the third.

    Raises:
        NotAffineError: the two are not alike (torch treats dimensions of size 1 in its own way, for example).
    """
    low, high = micro_batches
    if len(one.rows) != len(two.rows) or one.names != two.names:
        raise NotAffineError("the two tapes have other events")
    for column in ("kind", "place", "stream", "op", "module"):
        if not np.array_equal(one.rows[column], two.rows[column]):
            raise NotAffineError(f"the two tapes differ in {column}")
    kinds = one.rows["kind"]
    operations = kinds == Kind.OP
    if not np.array_equal(one.rows["ident"][~operations], two.rows["ident"][~operations]):
        raise NotAffineError("the two tapes name storages in another order")
    rows = one.rows.copy()
    scaled = np.isin(kinds, _SCALED)
    for column, where in (("size", scaled), ("ident", operations)):
        first, second = one.rows[column][where], two.rows[column][where]
        grown = (second - first) * (wanted - low)
        if column == "size" and np.any(grown % (high - low)):
            raise NotAffineError("a size does not grow in whole bytes")
        rows[column][where] = first + grown // (high - low)
        if np.any(rows[column][where] < 0):
            raise NotAffineError(f"a {column} would become negative")
    return Tape(rows, one.names, one.roles, one.facts)
