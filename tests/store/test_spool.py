"""What the database could not take is taken in once, by the study that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.store import spool
from autotune.store.records import probe_row
from autotune.store.store import Store
from autotune.workload.workload import Workload

CANDIDATE = Candidate(micro_batch=1, accumulation=16, zero_stage=1, precision="bf16")
OURS = {"workload": "a", "machine": "b"}


@pytest.fixture
def store(url: str, opened: Callable[..., Store], workload: Workload, machine: Machine) -> Store:
    store = opened(url)
    store.open_study("s", workload, machine)
    return store


def kept(folder: Path) -> Path:
    row = probe_row("s", CANDIDATE, Measurement(Outcome.OK, "table", tokens_per_s=100.0))
    return spool.keep(folder, row, None, OURS)


def test_a_measurement_is_taken_in_once_though_the_file_comes_again(store: Store, tmp_path: Path) -> None:
    path = kept(tmp_path)
    text = path.read_text()
    assert spool.take_in(tmp_path, store, OURS) == 1
    assert not path.exists()
    path.write_text(text)  # killed before the file was removed
    spool.take_in(tmp_path, store, OURS)
    assert [probe.key for probe in store.probes("s")] == [CANDIDATE.key]


def test_one_of_another_workload_or_machine_is_left_for_its_own_study(store: Store, tmp_path: Path) -> None:
    path = kept(tmp_path)
    for other in ({**OURS, "workload": "x"}, {**OURS, "machine": "x"}):
        assert spool.take_in(tmp_path, store, other) == 0
    assert path.exists()
    assert store.probes("s") == []
