"""Sweeps that predict: everything is looked at once, and what is planned never mixes with what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optuna
import pytest

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.table import TableProber
from autotune.search.result import Result
from autotune.search.search import Search
from autotune.settings import Settings
from autotune.space.space import Space
from autotune.store.records import ProbeRecord, winner_of

Make = Callable[..., Settings]
Table = Callable[..., Measurement]


class Oracle(TableProber):
    """Predicts by a table."""

    kind = "virtual"

    def __init__(self, table: Table) -> None:
        super().__init__(lambda candidate: replace(table(candidate), probe_kind="virtual"))
        self.prepared: list[Candidate] = []

    def prepare(self, candidates: Sequence[Candidate], on_progress: Callable[[int, int], None]) -> None:
        self.prepared = list(candidates)
        on_progress(len(candidates), len(candidates))

    def probe(self, request: ProbeRequest) -> Measurement:
        return super().probe(replace(request, stop_below_tokens_per_s=None))


@pytest.fixture
def plan(sweeper: Any, formula: Table) -> Callable[..., Result]:
    """Runs a sweep that predicts, in the store where the sweeper measures."""

    def run(settings: Settings, table: Table = formula, **more: Any) -> Result:
        sweeper.prober = Oracle(table)
        sweeper.search = Search(settings, Space(settings), sweeper.store, sweeper.prober, **more)
        result: Result = sweeper.search.run()
        return result

    return run


def winner(sweeper: Any) -> ProbeRecord | None:
    return winner_of(sweeper.store.study("formula-table-1x8"), sweeper.rows())


def unlimited(settings: Settings) -> Settings:
    settings.budget.probes = None
    return settings


def test_every_candidate_is_looked_at_once_and_none_again(sweeper: Any, plan: Any, settings: Make) -> None:
    mine = settings(checkpoint_blocks=["none", "half", "all"])
    result = plan(mine)
    candidates = Space(mine).candidates
    assert set(sweeper.probed) == set(candidates)
    assert sweeper.prober.prepared == sweeper.probed
    assert sweeper.confirmed == []
    assert len(sweeper.rows()) == len(candidates)
    assert result.counts.probed == len(candidates)
    assert not result.winner.confirmation


def test_nothing_is_inferred_of_what_can_be_predicted(plan: Any, settings: Make, formula: Table) -> None:
    result = plan(settings())
    assert result.counts.outcomes["oom_device"] > 2
    assert result.counts.inferred == 0


def test_the_winner_is_the_fastest_that_leaves_the_headroom(plan: Any, settings: Make, formula: Table) -> None:
    mine = settings(checkpoint_blocks=["none", "all"])
    limit = mine.machine.usable_bytes
    fitting = [c for c in Space(mine).candidates if (formula(c).used_bytes or limit + 1) <= limit]
    result = plan(mine)
    assert result.winner.candidate == max(fitting, key=lambda candidate: formula(candidate).tokens_per_s or 0)
    assert result.counts.feasible == len(fitting)
    assert result.winner.measurement.predicted


def test_a_space_of_a_thousand_is_sampled_only_beyond_that(plan: Any, sweeper: Any, large: Make) -> None:
    result = plan(unlimited(large(probes=40, checkpoint_input="device")))
    assert result.reason == "every candidate is tried"
    assert 500 < len(sweeper.probed) < 1000


def test_a_budget_that_is_set_holds_for_plans_too(plan: Any, sweeper: Any, large: Make) -> None:
    result = plan(large(probes=12))
    assert len(sweeper.probed) == 12
    assert sweeper.prober.prepared == []
    assert result.reason == "budget.probes=12 is spent"


def test_without_a_budget_forty_are_measured(sweeper: Any, large: Make) -> None:
    assert sweeper.run(unlimited(large())).reason == "budget.probes=40 is spent"


def test_a_plan_after_a_sweep_uses_none_of_its_measurements_and_leaves_its_winner(
    sweeper: Any, plan: Any, settings: Make
) -> None:
    measured = sweeper.run(settings())
    before = sweeper.rows()
    planned = plan(settings())
    assert set(sweeper.probed) == set(Space(settings()).candidates)
    assert planned.winner.measurement.predicted
    assert winner(sweeper) == measured.winner
    again = sweeper.run(settings())
    assert sweeper.prober.requests == []
    assert again.winner == measured.winner
    assert again.counts == measured.counts
    assert [row for row in sweeper.rows() if not row.measurement.predicted] == before


def test_a_sweep_after_a_plan_measures_everything_and_takes_its_place(
    sweeper: Any, plan: Any, settings: Make, formula: Table
) -> None:
    def dreamt(candidate: Candidate) -> Measurement:
        return replace(formula(candidate), outcome=Outcome.OK, tokens_per_s=1e9 * candidate.micro_batch)

    planned = plan(settings(), dreamt)
    assert winner(sweeper) == planned.winner
    measured = sweeper.run(settings())
    assert sweeper.probed
    assert not measured.winner.measurement.predicted
    assert measured.winner.confirmation
    assert winner(sweeper) == measured.winner
    assert measured.counts.probed == len(sweeper.probed)


def test_optunas_tables_hold_only_what_was_measured(sweeper: Any, plan: Any, settings: Make) -> None:
    plan(settings())
    assert optuna.get_all_study_names(sweeper.store.optuna_storage()) == []
    sweeper.run(settings())
    names = optuna.get_all_study_names(sweeper.store.optuna_storage())
    assert names == [f"formula-table-1x8/{Space(settings()).digest}"]


def test_the_same_plan_predicts_nothing_twice(sweeper: Any, plan: Any, settings: Make) -> None:
    first = plan(settings())
    again = plan(settings())
    assert (sweeper.probed, sweeper.prober.prepared) == ([], [])
    assert (again.winner, again.counts, again.reference) == (first.winner, first.counts, first.reference)


def test_predictions_of_other_versions_are_made_anew(sweeper: Any, plan: Any, settings: Make) -> None:
    plan(settings(), environment={"torch": "2.9"})
    plan(settings(), environment={"torch": "2.13"})
    assert set(sweeper.probed) == set(Space(settings()).candidates)
