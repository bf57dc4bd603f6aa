"""What a prediction and a measurement come to, with figures made up."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.machine.machine import GIB
from autotune.probe.measurement import Measurement, Outcome
from tests.gpu.comparison import METERS, PHASES, Check, Pair, Report

CANDIDATE = Candidate(micro_batch=2, accumulation=1, zero_stage=1, precision="bf16")


def measurement(kind: str, outcome: Outcome = Outcome.OK, ranks: tuple[int, ...] = (0,), **sizes: int) -> Measurement:
    """One whose every meter of every phase has 1 GiB, and rank r r GiB more; `backward_allocated=…` is another size."""
    memory = {
        phase: [
            {meter: sizes.get(f"{phase}_{meter}", (1 + rank) * GIB) for meter in METERS} | {"rank": rank}
            for rank in ranks
        ]
        for phase in PHASES
    }
    return Measurement(
        outcome, kind, memory=memory if outcome is Outcome.OK else {}, worst_rank=ranks[-1], message="out of it"
    )


def predicted(rank: int = 0, **sizes: int) -> Measurement:
    found = measurement("virtual", Outcome.OK, (rank,), **sizes)
    for phase in found.memory.values():
        del phase[0]["rank"]  # a prediction is of one rank, and says so elsewhere
    return found


def pair(mine: Measurement, theirs: Measurement, world: int = 1) -> Pair:
    return Pair(world, CANDIDATE, mine, theirs)


def off(share: float, name: str = "backward_allocated") -> Pair:
    return pair(predicted(**{name: round(GIB * (1 + share))}), measurement("torchrun"))


def printed(report: Report) -> str:
    out = io.StringIO()
    report.print(out)
    return out.getvalue()


def test_errors_are_shares_of_what_was_measured() -> None:
    figures = off(0.25).figures()
    assert figures["allocated"]["backward"].error == pytest.approx(0.25)
    assert {figure.error for meter in METERS for phase, figure in figures[meter].items() if phase != "backward"} == {0}


def test_the_rank_that_was_predicted_is_compared_with_itself() -> None:
    found = pair(predicted(rank=1), measurement("torchrun", ranks=(0, 1)), world=2)
    assert found.figures()["reserved"]["step"].measured == 2 * GIB
    assert found.faults() == []


@pytest.mark.parametrize(
    ("share", "good"), [(0.0, True), (0.009, True), (-0.009, True), (0.011, False), (-0.02, False)]
)
def test_allocated_is_good_within_1_percent_in_every_phase(share: float, good: bool) -> None:
    assert Report(pairs=[off(0.0), off(share)]).good is good


@pytest.mark.parametrize("meter", ["reserved", "device_total"])
def test_the_other_meters_are_shown_and_decide_nothing(meter: str) -> None:
    report = Report(pairs=[off(0.5, f"step_{meter}")])
    assert report.good
    assert "1.000 +50.00%" in printed(report)


def test_what_cannot_be_measured_on_a_device_is_left_out() -> None:
    without = measurement("torchrun")
    for ranks in without.memory.values():
        del ranks[0]["device_total"]
    assert set(pair(predicted(), without).figures()) == {"allocated", "reserved"}


def test_two_that_run_out_of_memory_agree() -> None:
    both = pair(measurement("virtual", Outcome.OOM_DEVICE), measurement("torchrun", Outcome.OOM_DEVICE))
    assert both.faults() == []
    assert Report(pairs=[off(0.0), both]).good
    assert not Report(pairs=[both]).good  # nothing was compared


@pytest.mark.parametrize("outcome", [Outcome.OOM_DEVICE, Outcome.CRASHED, Outcome.INFRA, Outcome.TIMEOUT])
def test_another_end_than_predicted_is_wrong(outcome: Outcome) -> None:
    report = Report(pairs=[off(0.0), pair(predicted(), measurement("torchrun", outcome))])
    assert not report.good
    assert f"ok is predicted, and {outcome} came: out of it" in printed(report)


def test_a_prediction_without_a_phase_is_wrong() -> None:
    mine = predicted()
    del mine.memory["step"]
    assert pair(mine, measurement("torchrun")).faults() == ["nothing is known of step"]


def test_a_failed_check_is_wrong() -> None:
    report = Report(pairs=[off(0.0)], checks=[Check(True, "this is well"), Check(False, "that is not")])
    assert not report.good
    assert "ok     this is well\nWRONG  that is not\n" in printed(report)


def test_one_table_shows_every_candidate_meter_and_phase() -> None:
    text = printed(Report(pairs=[off(0.05), off(0.0)], left_out=["1 ranks  another"]))
    assert text.count(str(CANDIDATE)) == 3  # twice in the table, once as wrong
    assert all(text.count(meter.replace("_", " ")) >= 2 for meter in METERS)
    assert all(phase.replace("_", " ") in text for phase in PHASES)
    assert "WRONG  1 ranks  mb 2 × acc 1  z1  bf16: allocated in backward is predicted +5.00% off" in text
    assert "left out, no time: 1 ranks  another" in text


def test_the_document_has_every_figure() -> None:
    written: dict[str, Any] = json.loads(json.dumps(Report(about={"seconds": 3}, pairs=[off(0.05)]).to_dict()))
    assert (written["good"], written["seconds"]) == (False, 3)
    found = written["pairs"][0]
    assert found["candidate"] == CANDIDATE.to_dict()
    assert found["outcome"] == {"predicted": "ok", "measured": "ok"}
    assert found["figures"]["allocated"]["backward"]["error"] == pytest.approx(0.05)
    assert {meter: set(phases) for meter, phases in found["figures"].items()} == {m: set(PHASES) for m in METERS}
