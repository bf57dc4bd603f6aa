"""A tape is what was written, also after it was saved."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.probe.virtual.tape import COLUMNS, Kind, Place, Row, Tape, TapeWriter

names = st.text(min_size=1, max_size=20)
limits = [np.iinfo(kind) for kind in list(COLUMNS.values())[3:]]
rows = st.tuples(
    st.sampled_from(Kind),
    st.sampled_from(Place),
    st.integers(0, 2**15 - 1),
    *(st.integers(int(limit.min), int(limit.max)) for limit in limits),
)
facts = st.dictionaries(names, st.integers() | st.booleans() | st.lists(st.integers(), max_size=3), max_size=3)


def written(events: list[Row], texts: list[str], roles: dict[int, str], known: dict[str, object]) -> TapeWriter:
    writer = TapeWriter()
    for text in texts:
        writer.name(text)
    writer.rows += events
    writer.roles |= roles
    writer.facts |= known
    return writer


@settings(deadline=None)
@given(
    st.lists(rows, max_size=30),
    st.lists(names, max_size=5),
    st.dictionaries(st.integers(1, 2**40), names, max_size=5),
    facts,
)
def test_a_saved_tape_is_loaded_equal(
    events: list[Row], texts: list[str], roles: dict[int, str], known: dict[str, object]
) -> None:
    tape = written(events, texts, roles, known).tape()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tape.npz"
        tape.save(path)
        loaded = Tape.load(path)
    assert [row.tolist() for row in loaded.rows] == events
    assert loaded.rows.dtype == tape.rows.dtype
    assert (loaded.names, loaded.roles, loaded.facts) == (tape.names, tape.roles, tape.facts)


def test_names_are_kept_once_and_found_by_their_index() -> None:
    writer = TapeWriter()
    assert [writer.name(text) for text in ("", "a", "b", "a")] == [0, 1, 2, 1]
    assert [writer.text(index) for index in range(3)] == ["", "a", "b"] == writer.tape().names


def test_a_stopped_writer_keeps_what_was_before() -> None:
    before: list[Row] = [(Kind.ALLOC, 0, 0, 0, 0, 1, 8), (Kind.ALLOC, 0, 0, 0, 0, 2, 8)]
    writer = written(list(before), [], {}, {})
    writer.stop()
    writer.rows.append((Kind.FREE, 0, 0, 0, 0, 2, 8))
    writer.stop()
    writer.rows.append((Kind.FREE, 0, 0, 0, 0, 1, 8))
    assert [row.tolist() for row in writer.tape().rows] == before


def test_a_tape_does_not_change_with_what_is_written_later() -> None:
    writer = written([(Kind.ALLOC, 0, 0, 0, 0, 1, 8)], ["a"], {1: "parameters"}, {"depth": 1})
    tape = writer.tape()
    writer.rows.append((Kind.FREE, 0, 0, 0, 0, 1, 8))
    writer.roles[2], writer.facts["depth"] = "gradients", 2
    writer.name("b")
    assert (len(tape.rows), tape.names, tape.roles, tape.facts) == (1, ["", "a"], {1: "parameters"}, {"depth": 1})


class TestABrokenFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "tape.npz"
        written([(Kind.ALLOC, 0, 0, 0, 0, i, i * i) for i in range(1, 500)], ["a" * 500], {}, {}).tape().save(path)
        return path

    def test_cut_short_anywhere_is_an_error(self, path: Path) -> None:
        whole = path.read_bytes()
        for length in range(0, len(whole), 61):
            path.write_bytes(whole[:length])
            with pytest.raises(ValueError, match="no whole tape"):
                Tape.load(path)

    def test_with_a_wrong_byte_in_its_numbers_is_an_error(self, path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 0xFF
        path.write_bytes(whole)
        with pytest.raises(ValueError, match="no whole tape"):
            Tape.load(path)

    def test_of_something_else_is_an_error(self, path: Path) -> None:
        np.savez(path, kind=np.zeros(3))
        with pytest.raises(ValueError, match="no whole tape"):
            Tape.load(path)

    def test_that_is_not_there_is_said_to_be_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            Tape.load(tmp_path / "none.npz")
