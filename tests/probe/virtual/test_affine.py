"""Two micro-batches of an affine program give every other; two programs that are not one give nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.virtual.affine import NotAffineError, at_micro_batch
from autotune.probe.virtual.tape import Kind, Place, Tape
from autotune.workload.phase import Phase

from .script import Script

Action = tuple[str, int, int, int]  # what, constant, growth with every sequence, choice among places, streams, …
actions = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "free", "op", "copy", "collective", "record", "event", "phase"]),
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.integers(0, 5),
    ),
    max_size=30,
)


def play(program: list[Action], micro_batch: int) -> Tape:
    """The tape of a program at a micro-batch."""
    script = Script()
    script.phase(Phase.FORWARD)
    alive: list[int] = []
    for number, (what, constant, growth, choice) in enumerate(program):
        size = constant + micro_batch * growth
        script.module = f"block.{choice}"
        if what == "alloc":
            alive.append(script.alloc(size, list(Place)[choice % 3], choice, role="gradients" if choice == 5 else None))
        elif what == "free" and alive:
            script.free(alive.pop(choice % len(alive)))
        elif what == "op":
            script.op(f"aten::{choice}", flops=size * 3, traffic=size, stream=choice)
        elif what == "copy":
            script.copy(size, bool(choice % 2))
        elif what == "collective":
            script.collective("allreduce_", choice, size, stream=1)
        elif what == "record" and alive:
            script.mark(Kind.RECORD_STREAM, alive[choice % len(alive)], choice)
        elif what == "event":
            script.mark(Kind.EVENT_RECORD, number)
            script.mark(Kind.EVENT_WAIT, number, choice)
        elif what == "phase":
            script.phase(list(Phase)[choice % 3], choice)
    script.writer.facts["depth"] = len(program)
    return script.tape()


@given(
    actions,
    st.sampled_from([(1, 2), (2, 4), (2, 8), (4, 3)]),
    st.integers(1, 64),
)
def test_two_micro_batches_give_every_other(program: list[Action], known: tuple[int, int], wanted: int) -> None:
    one, two = (play(program, micro_batch) for micro_batch in known)
    before = one.rows.copy()
    made, real = at_micro_batch(one, two, known, wanted), play(program, wanted)
    np.testing.assert_array_equal(made.rows, real.rows)
    assert (made.names, made.roles, made.facts) == (real.names, real.roles, real.facts)
    np.testing.assert_array_equal(one.rows, before)


PROGRAM: list[Action] = [
    ("alloc", 64, 8, 0),
    ("op", 0, 100, 1),
    ("collective", 10, 0, 2),
    ("alloc", 32, 4, 1),
    ("copy", 4, 4, 1),
    ("free", 0, 0, 0),
    ("event", 0, 0, 1),
]


def changed(column: str, row: int) -> Callable[[Tape], Tape]:
    def change(tape: Tape) -> Tape:
        rows = tape.rows.copy()
        rows[column][row] += 1
        return dataclasses.replace(tape, rows=rows)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda tape: dataclasses.replace(tape, rows=tape.rows[:-1]),  # fewer events
        lambda tape: dataclasses.replace(tape, names=[*tape.names, "more"]),
        lambda tape: dataclasses.replace(tape, names=[*tape.names[:-1], "other"]),
        changed("kind", 2),
        changed("place", 1),
        changed("stream", 3),
        changed("op", 2),
        changed("module", 2),
        changed("ident", 1),  # another storage
        changed("ident", 3),  # another group of ranks
        changed("ident", 5),  # a copy the other way
        changed("ident", 7),  # another event
    ],
)
def test_what_differs_in_more_than_sizes_is_not_affine(change: Callable[[Tape], Tape]) -> None:
    one, two = play(PROGRAM, 1), play(PROGRAM, 2)
    at_micro_batch(one, two, (1, 2), 8)
    with pytest.raises(NotAffineError):
        at_micro_batch(one, change(two), (1, 2), 8)
    with pytest.raises(NotAffineError):
        at_micro_batch(change(one), two, (1, 2), 8)


def test_a_size_that_does_not_grow_in_whole_bytes_is_not_affine() -> None:
    with pytest.raises(NotAffineError, match="whole bytes"):
        at_micro_batch(play([("alloc", 64, 1, 0)], 2), play([("alloc", 65, 1, 0)], 4), (2, 4), 5)


def test_a_size_that_would_become_negative_is_not_affine() -> None:
    with pytest.raises(NotAffineError, match="negative"):
        at_micro_batch(play([("alloc", 64, 0, 0)], 1), play([("alloc", 32, 0, 0)], 2), (1, 2), 4)
