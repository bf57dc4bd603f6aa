"""Finds the loops of a run: where the tape of a deeper model has more copies of what comes before them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.probe.virtual.depth_text import SIZE, Hashes, Ints, NotExtendable, Text, hashed


@dataclass(frozen=True, slots=True)
class Loop:
    """Where the deeper tape has more copies.

    Attributes:
        start, end: the rows of those copies on the deeper tape.
        one: rows of one copy; there are several where a period has several blocks that are treated alike.
        before: how many more rows the deeper tape has before them.
    """

    start: int
    end: int
    one: int
    before: int

    @property
    def length(self) -> int:
        """Rows of all copies."""
        return self.end - self.start


def loops(first: Text, second: Text) -> Iterator[Loop]:
    """Where the second text has more copies: in the middle of where all numbers grow alike from copy to copy.

    Raises:
        NotExtendable: the second text is not the first one with more copies in its loops.
    """
    begin = 0
    for start, length, before in _differences(first.lax, first.strict, second.lax, second.strict):
        end = start + length
        units = _units(second.strict[start:end])
        for one in units:
            try:
                found = list(
                    _settled(first, second, Loop(_since(second.strict, begin, end, one), end, one, before), length)
                )
                break
            except NotExtendable:
                if one == units[-1]:
                    raise
        yield from found
        begin = end


def _settled(first: Text, second: Text, run: Loop, length: int) -> Iterator[Loop]:
    """The copies that one run of equal copies has more.

    Rows that look alike may refer to what grows by other numbers in one part of the run than in another: the two texts
    are compared once more, by how numbers grow.

    Args:
        first: the text of the shallow tape.
        second: that of the deeper one.
        run: where the deeper tape repeats.
        length: rows that it has more.
    """
    where = f"rows {run.start} to {run.end} of the deeper tape, copies of {run.one},"
    if run.end - run.start < length + 2 * run.one:
        raise NotExtendable(f"{where} are too few")
    start, one = run.start, run.one
    before, after = first.values[start - run.before : run.end - length - run.before], second.values[start : run.end]
    shown = first.lax[start - run.before : run.end - length - run.before], second.lax[start : run.end]
    few, growth = before[one:] - before[:-one], after[one:] - after[:-one]
    text = hashed(*growth.T)
    begin = 0
    for at, more, earlier in _differences(shown[0][one:], hashed(*few.T), shown[1][one:], text, one):
        begin, end = _since(text, begin, at + more, one), at + more
        if more % one or end - begin < more + one or np.any(growth[begin:end, SIZE]):
            raise NotExtendable(f"{where} repeat, but not in what they refer to")
        middle = start + (begin + end + one - more) // 2
        found = Loop(middle, middle + more, one, run.before + earlier)
        if not _grows(first, second, found, start + begin, start + end + one):
            raise NotExtendable(f"{where} do not grow with depth as they repeat")
        yield found
        begin = end


def _grows(first: Text, second: Text, loop: Loop, low: int, high: int) -> bool:
    """Whether what a further period does to the numbers of a copy is the same in all copies between two rows."""
    start, end, one, before = loop.start, loop.end, loop.one, loop.before
    early = second.values[low:start] - first.values[low - before : start - before]
    late = second.values[end:high] - first.values[start - before : high - loop.length - before]
    step = second.values[start : start + one] - second.values[start - one : start]
    return _alike(early[::-1], early[: -one - 1 : -1]) and _alike(late, early[-one:] + step * (loop.length // one))


def _differences(
    lax: Hashes, strict: Hashes, more_lax: Hashes, more_strict: Hashes, one: int = 0
) -> Iterator[tuple[int, int, int]]:
    """What one text has more than another: each time rows that repeat those before them, as late as can be read.

    Args:
        lax: of the shorter text, equal where rows may stand for each other.
        strict: of the shorter text, equal where rows are.
        more_lax: of the longer text.
        more_strict: of the longer text.
        one: rows of a copy, where that is known.

    Yields:
        The first of those rows, their number, how many there were before them.
    """
    here, there, before = 0, 0, 0
    missing = len(more_strict) - len(strict)
    repeats = _Repeats(more_strict)
    while True:
        equal = _common(strict[here:], more_strict[there:])
        here, there = here + equal, there + equal
        if here == len(strict) and there == len(more_strict):
            return
        best, length = (0, 0), -1
        candidates = repeats.before(there, missing - before, one)
        if not one or (_breaks(strict, here, one) and _breaks(more_strict, there, one)):
            candidates = [0, *candidates]
        for candidate in candidates:
            onward = there + candidate
            alike = _common(lax[here:], more_lax[onward:])
            equal = int(np.count_nonzero(strict[here : here + alike] == more_strict[onward : onward + alike]))
            score = (equal, alike)
            if here == len(strict):
                score = (int(onward == len(more_strict)), 0)
            if score > best:
                best, length = score, candidate
        if length < 0:
            raise NotExtendable(f"at row {there} of the deeper tape it has more, which is not what was before")
        if length:
            yield there, length, before
            there, before = there + length, before + length
        else:
            here, there = here + 1, there + 1  # the same row with other numbers


def _breaks(text: Hashes, at: int, one: int) -> bool:
    """Whether a row is not what it was one copy before."""
    return at < one or (at < len(text) and text[at] != text[at - one])


def _since(text: Hashes, begin: int, end: int, one: int) -> int:
    """From which row, at least `begin`, up to `end` a text repeats after every `one` rows."""
    different = np.flatnonzero(text[begin : end - one] != text[begin + one : end])
    return begin + (int(different[-1]) + 1 if len(different) else 0)


def _units(text: Hashes) -> list[int]:
    """Rows of the texts, shortest first, of which this one is a number of copies."""
    length = len(text)
    shorter = (n for n in range(1, length // 2 + 1) if length % n == 0)
    return [*(n for n in shorter if np.array_equal(text[n:], text[:-n])), length]


def _common(one: Hashes, other: Hashes) -> int:
    """How many rows two texts have in common from their beginning."""
    at, step = 0, 64
    length = min(len(one), len(other))
    while at < length:
        end = min(at + step, length)
        different = np.flatnonzero(one[at:end] != other[at:end])
        if len(different):
            return at + int(different[0])
        at, step = end, step * 4
    return length


class _Repeats:
    """Finds rows that repeat what stands before them, by hashes of all prefixes of a text."""

    def __init__(self, text: Hashes) -> None:
        self._text = text
        base = np.full(len(text) + 1, 0xD6E8FEB86659FD93, dtype=np.uint64)
        base[0] = 1
        self._powers = np.cumprod(base)  # modulo 2^64
        self._prefix = np.zeros(len(text) + 1, dtype=np.uint64)
        np.cumsum(text * self._powers[:-1], out=self._prefix[1:])

    def before(self, at: int, longest: int, one: int) -> list[int]:
        """Lengths, at most `longest`, of rows from `at` that repeat as many rows before, or copies of `one` row."""
        longest = min(longest, len(self._text) - at)
        if one and at >= one:
            equal = _common(self._text[at : at + longest], self._text[at - one : at + longest - one])
            return list(range(one, equal + 1, one))
        longest = min(longest, at)
        if longest <= 0:
            return []
        lengths = np.arange(1, longest + 1)
        after = self._prefix[at + lengths] - self._prefix[at]
        earlier = self._prefix[at] - self._prefix[at - lengths]
        found = lengths[after == earlier * self._powers[lengths]]
        text = self._text
        return [
            int(n) for n in found if np.array_equal(text[at : at + n], text[at - n : at]) and self._often(at, int(n))
        ]

    def _often(self, at: int, length: int) -> bool:
        """Whether rows repeat not just what was before them, but what was twice before."""
        one = _units(self._text[at : at + length])[0]
        return _since(self._text, 0, at + length, one) <= at - 2 * one


def _alike(rows: Ints, pattern: Ints) -> bool:
    """Whether rows are a pattern over and over."""
    return np.array_equal(rows, np.resize(pattern, rows.shape))
