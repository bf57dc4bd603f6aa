"""Real candidates whose memory creeps or whose losses differ are found out, and good ones are not accused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber
from autotune.search.observer import Observer
from autotune.search.result import Result
from autotune.search.search import Search
from autotune.settings import compose_settings
from autotune.space.space import Space
from autotune.store.store import Store

from .conftest import PLAIN, STAGES, replace

pytestmark = pytest.mark.probes

Faulty = Callable[..., Measurement]
CUSTOM = ("machine=cpu", "model=custom", "model.factory=faulty:build", "workload.seq_len=64", "probe.stop_losers=false")
QUICK = ("probe.steps=1", "probe.warmup_steps=1", "probe.confirm_steps=3", "objective.finalists=1")
BUCKETS = ("space.reduce_bucket_size=2000000", "space.allgather_bucket_size=2000000")
NARROW = (*BUCKETS, "space.offload_optimizer=none", "space.offload_param=none", "space.checkpoint_blocks=none")


class Notes(Observer):
    """Keeps what is noticed."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def noticed(self, text: str) -> None:
        self.noted.append(text)


class Ordered(TorchrunProber):
    """Real probes, whose speed is decreed: larger micro-batches and fp32 win, however busy the machine is."""

    def probe(self, request: ProbeRequest) -> Measurement:
        candidate = request.candidate
        speed = 100.0 * candidate.micro_batch + 1000.0 * (candidate.precision == "fp32")
        return dataclasses.replace(super().probe(request), tokens_per_s=speed)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> Iterator[Callable[..., Any]]:
    """Sweeps a few candidates of the small custom model; returns the result, and what was noticed."""
    monkeypatch.chdir(Path(__file__).parent)
    store = Store.open(f"sqlite:///{tmp_path / 'autotune.db'}")

    def run(fault: str, *overrides: str) -> tuple[Result, list[str]]:
        composed = compose_settings([*CUSTOM, *QUICK, *NARROW, f"+model.args={{fault:{fault}}}", *overrides])
        notes = Notes()
        search = Search(composed, Space(composed), store, Ordered(composed, launcher), observer=notes)
        return search.run(), notes.noted

    yield run
    store.close()


class TestCreep:
    def test_a_candidate_that_keeps_a_little_more_at_every_step_is_at_risk(self, faulty: Faulty) -> None:
        measured = faulty("leak", PLAIN, confirm_steps=12)
        assert measured.outcome is Outcome.OK, measured
        assert "device memory of rank 1 grows by" in (measured.at_risk or "")

    @pytest.mark.parametrize("stage", [1, 3])
    def test_a_sound_one_is_not(self, faulty: Faulty, stage: int) -> None:
        measured = faulty("none", replace(PLAIN, **STAGES[stage]), confirm_steps=15)
        assert measured.outcome is Outcome.OK
        assert measured.at_risk is None
        assert [len(rank["device"]) for rank in measured.detail["steps"]] == [15, 15]


class TestParity:
    def test_a_skipped_step_does_not_shift_the_data(self, faulty: Faulty) -> None:
        steps = {"confirm_steps": 3}
        plain, skipping = (faulty(fault, replace(PLAIN, accumulation=1), **steps) for fault in ("none", "overflow"))
        assert (plain.skipped_steps, skipping.skipped_steps) == (0, 3)
        assert skipping.losses == pytest.approx(plain.losses, rel=1e-4)
        assert len(set(plain.losses)) == len(plain.losses)

    def test_of_a_sound_winner_is_told_with_how_closely_it_agrees(self, sweep: Callable[..., Any]) -> None:
        result, noted = sweep(
            "none",
            "workload.global_batch=8",
            "space.micro_batch=[1,4]",
            "space.precision=[bf16,fp32]",
            "space.zero_stage=1",
        )
        assert result.aside == []
        winner, reference = result.winner, result.reference
        assert (winner.candidate.micro_batch, winner.candidate.precision) == (4, "fp32")
        assert (reference.candidate.micro_batch, reference.candidate.precision) == (1, "bf16")
        found = winner.measurement.detail["parity"]
        assert (found["agrees"], found["steps"], found["reference_trial"]) == (True, 5, reference.trial)
        assert found["loss"] > 0
        assert not [text for text in noted if "set aside" in text]

    def test_a_winner_whose_loss_grows_with_its_micro_batch_is_set_aside_for_the_next(
        self, sweep: Callable[..., Any]
    ) -> None:
        result, noted = sweep("sum", "workload.global_batch=8", "space.micro_batch=[1,4]", "space.zero_stage=1")
        [aside] = result.aside
        assert aside.candidate.micro_batch == 4
        assert "its first loss differs from the reference's by" in aside.measurement.detail["parity"]["reason"]
        assert result.winner.candidate.micro_batch == 1
        assert any("is set aside: it trains differently" in text for text in noted)

    def test_candidates_of_different_global_batches_are_compared_at_one_of_both(
        self, sweep: Callable[..., Any]
    ) -> None:
        batches = ("space.micro_batch=[1,2]", "space.accumulation=1", "space.zero_stage=1")
        good, _ = sweep("none", *batches, "study.name=good")
        assert good.winner.candidate.micro_batch == 2
        found = good.winner.measurement.detail["parity"]
        assert (found["global_batch"], found["agrees"], found["steps"]) == (4, True, 7)
        bad, noted = sweep("sum", *batches, "study.name=bad")
        assert [record.candidate.micro_batch for record in bad.aside] == [2]
        assert bad.winner.candidate.micro_batch == 1
        assert any("at a global batch of 4" in text for text in noted)
