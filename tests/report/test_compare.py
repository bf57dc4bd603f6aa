"""Comparing studies: per device, with spreads, and no claim where they overlap."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement
from autotune.report.compare import Entry, compare_studies, compare_two
from autotune.store.store import Store
from autotune.workload.workload import Model, Workload


def compared(store: Store, form: str, *names: str) -> str:
    out = io.StringIO()
    compare_studies(store, list(names), form, out)
    return out.getvalue()


def entry(store: Store, name: str, devices: int, measurement: Measurement, seq_len: int = 4096) -> Entry:
    workload = Workload(model=Model(name="m"), seq_len=seq_len)
    machine = Machine(name="x", devices_per_node=devices, device_memory_gib=80)
    study = store.open_study(name, workload, machine)
    candidate = Candidate(micro_batch=1, accumulation=1, zero_stage=1, precision="bf16")
    return Entry(study, store.add_probe(name, candidate, measurement))


def test_throughput_is_per_device(store: Store) -> None:
    document = json.loads(compared(store, "json", "a", "b"))
    first, second = document["studies"]
    assert first["tokens_per_s_per_device"] == 5_000
    assert second["tokens_per_s_per_device"] == 15_000
    assert first["used_share"] == pytest.approx(60 / 79.1)
    (verdict,) = document["comparisons"]
    assert (verdict["study"], verdict["base"], verdict["ratio"]) == ("b", "a", 3.0)
    assert verdict["significant"] is True
    assert verdict["ratio_low"] < 3 < verdict["ratio_high"]


def test_what_differs_is_told_and_what_is_equal_is_not(store: Store) -> None:
    found = json.loads(compared(store, "json", "a", "b"))["differences"]
    assert found["candidate"] == {"accumulation": [16, 32], "zero_stage": [2, 3]}
    assert found["machine"]["device"] == ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"]
    assert "device_memory_gib" not in found["machine"]
    assert found["workload"] == {}
    with_empty = json.loads(compared(store, "json", "a", "b", "empty"))["differences"]
    assert with_empty["candidate"] == {"accumulation": [16, 32, None], "zero_stage": [2, 3, None]}


def test_the_table_has_the_winners_the_differences_and_the_verdict(store: Store) -> None:
    text = compared(store, "table", "a", "b")
    for expected in (
        "15,000",
        "14,975–15,025",
        "60.00 GiB",
        "what differs in the winners",
        "what differs in the machines",
    ):
        assert expected in text
    assert "what differs in the workloads" not in text
    assert "b is faster than a per device: +200.0 %" in text


def test_csv_has_a_row_per_study_and_a_column_per_difference(store: Store) -> None:
    first, second = csv.DictReader(io.StringIO(compared(store, "csv", "a", "b")))
    assert (first["candidate.zero_stage"], second["candidate.zero_stage"]) == ("2", "3")
    assert (first["ratio"], second["ratio"]) == ("", "3.0")


def test_a_study_without_a_winner_is_named(store: Store) -> None:
    document = json.loads(compared(store, "json", "a", "empty"))
    assert document["comparisons"][0]["significant"] is None
    assert "empty has no winner yet" in document["comparisons"][0]["sentence"]
    assert "no winner yet" in compared(store, "table", "a", "empty")


def test_overlapping_spreads_are_no_difference(store: Store, ok: Any) -> None:
    base = entry(store, "one", 1, ok(1_000.0, 50.0))
    verdict = compare_two(base, entry(store, "two", 1, ok(1_080.0, 50.0)))
    assert verdict.row()["significant"] is False
    assert verdict.sentence.startswith("no significant difference between two and one")
    clear = compare_two(base, entry(store, "three", 2, ok(2_220.0, 50.0)))
    assert clear.row()["significant"] is True
    slower = compare_two(base, entry(store, "four", 1, ok(800.0, 50.0)))
    assert slower.sentence.startswith("four is slower than one")


def test_without_a_spread_nothing_is_claimed(store: Store, ok: Any) -> None:
    verdict = compare_two(entry(store, "one", 1, ok(1_000.0)), entry(store, "two", 1, ok(2_000.0, None)))
    assert verdict.row()["significant"] is None
    assert "no spread is known" in verdict.sentence


def test_different_workloads_and_probe_kinds_are_said(store: Store, ok: Any) -> None:
    base = entry(store, "one", 1, ok(1_000.0))
    other = entry(store, "two", 1, ok(2_000.0, probe_kind="virtual"), seq_len=128)
    assert "they train different workloads" in compare_two(base, other).sentence
    assert "torchrun and virtual" in compare_two(base, other).sentence


def test_what_is_predicted_is_no_proof(store: Store, ok: Any) -> None:
    base = entry(store, "one", 1, ok(1_000.0, 0.001, probe_kind="virtual"))
    verdict = compare_two(base, entry(store, "two", 1, ok(2_000.0, 0.001, probe_kind="virtual")))
    assert verdict.row()["significant"] is None
    assert verdict.sentence.endswith("no spread is known; both are planned, not measured")


def test_one_study_is_too_few(store: Store) -> None:
    with pytest.raises(SettingsError, match="two studies"):
        compared(store, "table", "a")
