"""What is told of a winner beside its figures."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from typing import Any

from autotune.probe.measurement import Measurement, Outcome
from autotune.report.listing import list_trials
from autotune.report.notes import parity, remarks, share
from autotune.search.parity import Trace, compare
from autotune.store.store import Store

from .conftest import BEST

OK = Measurement(Outcome.OK, "torchrun", tokens_per_s=1.0)
LOSSES = [8.0, 7.9, 7.8]
FOUND = compare(Trace("bf16", [8.0, 7.9, 7.8016], [0.5, 0.5, 0.5]), Trace("bf16", LOSSES, [0.5, 0.5, 0.51])).to_dict()
STRAGGLER = {"rank": 3, "node": 0, "device": 3, "slower_by": 0.21}


def told(**detail: Any) -> list[str]:
    return remarks(dataclasses.replace(OK, detail=detail))


def test_of_a_plain_measurement_nothing_is_remarked() -> None:
    assert remarks(OK) == []
    assert told(parity=FOUND) == []


def test_risks_devices_and_doubts_are_remarked_in_sentences() -> None:
    assert remarks(dataclasses.replace(OK, at_risk="it leaks")) == ["At risk: it leaks."]
    assert "rank 3 (device 3 of node 0) is 21 % slower than its peers" in told(straggler=STRAGGLER)[0]
    assert told(slow_machine=0.4) == ["When this was measured, the machine was 40 % slower than usual."]
    assert told(devices=["device 3 is busy"]) == ["Found before the study: device 3 is busy."]
    assert told(parity={"agrees": None, "reason": "it could not be probed"}) == ["Losses: it could not be probed."]


def test_parity_is_told_with_how_closely_losses_agree() -> None:
    assert parity(FOUND) == "losses agree with the reference's to 0.021 % over 3 steps, gradient norms to 0.98 %"
    wrong = compare(Trace("bf16", [4.0, 4.0], []), Trace("bf16", LOSSES, [])).to_dict()
    assert "its first loss differs from the reference's by 50 %" in parity(wrong)


def test_shares_have_two_digits_however_small() -> None:
    assert [share(value) for value in (0.0, 2.3e-7, 0.00021, 0.5, 1.0)] == [
        "0 %",
        "0.000023 %",
        "0.021 %",
        "50 %",
        "100 %",
    ]


def test_trials_show_what_is_at_risk_slow_or_set_aside(store: Store) -> None:
    bad = dataclasses.replace(
        OK, at_risk="it leaks", detail={"straggler": STRAGGLER, "slow_machine": 0.4, "parity": {"agrees": False}}
    )
    store.add_probe("a", BEST, bad, confirmation=True)
    out = StringIO()
    list_trials(store, "a", "json", out)
    row = json.loads(out.getvalue())[-1]
    assert (row["at_risk"], row["straggler"], row["slow_machine"]) == ("it leaks", STRAGGLER, 0.4)
    out = StringIO()
    list_trials(store, "a", "table", out)
    for words in ("at risk", "set aside", "rank 3 slow", "slow machine"):
        assert words in " ".join(out.getvalue().split())
