"""Listings: one row per study and per trial, the same facts as table, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.errors import SettingsError
from autotune.report.listing import list_studies, list_trials
from autotune.store.store import Store

PROMISED = (
    "trial key candidate outcome phase tokens_per_s step_s peak_allocated_bytes peak_reserved_bytes host_peak_bytes "
    "probe_kind wall_s inferred reused confirmation"
)


BEST = Candidate(micro_batch=4, accumulation=16, zero_stage=2, precision="bf16")


def trials(store: Store, form: str, study: str = "a") -> str:
    out = io.StringIO()
    list_trials(store, study, form, out)
    return out.getvalue()


def studies(store: Store, form: str) -> str:
    out = io.StringIO()
    list_studies(store, form, out)
    return out.getvalue()


def test_trials_as_json_have_the_promised_keys(store: Store) -> None:
    rows = json.loads(trials(store, "json"))
    assert len(rows) == 4
    for row in rows:
        assert set(PROMISED.split()) <= set(row)
    first, oom, inferred, winner = rows
    assert first["outcome"] == "ok"
    assert first["candidate"]["zero_stage"] == 1
    assert first["tokens_per_s"] == 30_000
    assert (oom["outcome"], oom["phase"], oom["inferred"]) == ("oom_device", "forward", False)
    assert inferred["inferred"] is True
    assert (winner["confirmation"], winner["winner"]) == (True, True)


def test_trials_as_csv_have_the_same_rows(store: Store) -> None:
    rows = list(csv.DictReader(io.StringIO(trials(store, "csv"))))
    assert [row["trial"] for row in rows] == ["1", "2", "3", "4"]
    assert json.loads(rows[3]["candidate"])["zero_stage"] == 2
    assert (rows[3]["tokens_per_s"], rows[1]["tokens_per_s"]) == ("40000.0", "")
    assert rows[2]["inferred"] == "true"


def test_trials_as_a_table_are_in_people_s_units(store: Store) -> None:
    text = trials(store, "table")
    assert "40,000" in text
    assert "39,900–40,100" in text
    assert "60.00 GiB" in text
    assert "oom_device in forward" in text
    assert "confirmation, winner" in text
    assert "mb 4 × acc 16  z2  bf16" in text
    assert "\x1b" not in text


def test_studies_count_their_outcomes_and_name_their_winner(store: Store) -> None:
    first, second, empty = json.loads(studies(store, "json"))
    assert (first["study"], first["trials"], first["ok"], first["oom"], first["other"]) == ("a", 4, 2, 2, 0)
    assert (first["winner_trial"], first["winner"]["zero_stage"]) == (4, 2)
    assert (second["machine"], second["devices_per_node"]) == ("h100_80g", 4)
    assert (empty["trials"], empty["winner"], empty["tokens_per_s"]) == (0, None, None)
    assert "40,000" in studies(store, "table")
    assert len(list(csv.reader(io.StringIO(studies(store, "csv"))))) == 4


def test_an_unknown_study_is_refused_with_those_that_there_are(store: Store) -> None:
    with pytest.raises(SettingsError) as error:
        trials(store, "table", "nonesuch")
    assert "a, b, empty" in error.value.hint


def test_what_is_predicted_is_told_from_what_was_measured(store: Store, ok: Any) -> None:
    predicted = store.add_probe("empty", BEST, ok(90_000.0, 0.0, probe_kind="virtual"))
    store.set_winner("empty", predicted.trial)
    [row] = json.loads(trials(store, "json", "empty"))
    assert row["probe_kind"] == "virtual"
    assert "predicted, winner" in trials(store, "table", "empty")
    assert "90,000–90,000" not in trials(store, "table", "empty")
    *_, planned = json.loads(studies(store, "json"))
    assert (planned["predicted"], planned["winner_probe_kind"]) == (1, "virtual")
    assert studies(store, "table").count("(planned, not measured)") == 1
