"""The winner comes from longer measurements of the best and of a reference; or it is said why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.errors import InfraError, NothingFeasible
from autotune.machine.machine import GIB
from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.table import TableProber
from autotune.search.search import Search
from autotune.settings import Settings
from autotune.space.space import Space
from autotune.workload.phase import Phase

Make = Callable[..., Settings]
Table = Callable[..., Measurement]


class SecondThoughts(TableProber):
    """Measures otherwise in confirmations."""

    def __init__(self, table: Table, confirmed: Table) -> None:
        super().__init__(table)
        self._searching, self._confirming = table, confirmed

    def probe(self, request: ProbeRequest) -> Measurement:
        self._table = self._confirming if request.confirmation else self._searching
        return super().probe(request)


@pytest.fixture
def sweep(sweeper: Any, formula: Table) -> Callable[..., Any]:
    """Runs a sweep whose confirmations have a table of their own."""

    def run(settings: Settings, confirmed: Table) -> Any:
        sweeper.prober = SecondThoughts(formula, confirmed)
        return Search(settings, Space(settings), sweeper.store, sweeper.prober).run()

    return run


@pytest.fixture
def everything(settings: Make) -> Settings:
    """A space of eight feasible candidates, all measured to the end."""
    mine = settings(checkpoint_blocks=["none", "all"], micro_batch=[1, 2, 4], zero_stage=[1, 2])
    mine.probe.stop_losers = False
    return mine


def ranked(settings: Settings, formula: Table) -> list[Candidate]:
    def fits(candidate: Candidate) -> bool:
        measured = formula(candidate)
        return measured.outcome is Outcome.OK and measured.used_bytes <= settings.machine.usable_bytes

    return sorted(
        filter(fits, Space(settings).candidates), key=lambda candidate: -(formula(candidate).tokens_per_s or 0)
    )


def test_the_best_three_and_the_baseline_are_measured_again_and_longer(
    sweeper: Any, everything: Settings, formula: Table
) -> None:
    result = sweeper.run(everything)
    best = ranked(everything, formula)
    baseline = Space(everything).baseline
    assert baseline not in best[:3]
    assert sweeper.confirmed == [baseline, *best[:3]]
    requests = [request for request in sweeper.prober.requests if request.confirmation]
    assert {(request.steps, request.stop_below_tokens_per_s) for request in requests} == {(15, None)}
    assert result.winner.candidate == best[0]
    assert result.reference.candidate == baseline
    assert result.baseline.candidate == baseline
    assert not result.baseline.confirmation
    assert result.gain == pytest.approx(formula(best[0]).tokens_per_s / formula(baseline).tokens_per_s)
    assert result.significant
    assert [record.candidate for record in result.confirmations] == [*best[:3], baseline]


def test_a_baseline_among_the_finalists_is_measured_once(sweeper: Any, settings: Make) -> None:
    result = sweeper.run(settings(zero_stage=[1], micro_batch=[1, 8]))
    assert sweeper.confirmed == [Space(settings()).baseline]
    assert result.winner == result.reference
    assert result.gain == 1.0
    assert not result.significant


def test_the_longer_measurement_decides(sweep: Callable[..., Any], everything: Settings, formula: Table) -> None:
    first, second = ranked(everything, formula)[:2]

    def confirmed(candidate: Candidate) -> Measurement:
        measured = formula(candidate)
        return dataclasses.replace(measured, tokens_per_s=1.0) if candidate == first else measured

    assert sweep(everything, confirmed).winner.candidate == second


def test_spreads_that_overlap_are_no_significant_gain(
    sweep: Callable[..., Any], everything: Settings, formula: Table
) -> None:
    wide = sweep(everything, lambda c: dataclasses.replace(formula(c), tokens_per_s_low=1.0, tokens_per_s_high=1e9))
    assert wide.gain > 1
    assert not wide.significant


@pytest.mark.parametrize(
    "measured",
    [
        Measurement(Outcome.OOM_DEVICE, "table", phase=Phase.STEP),
        Measurement(Outcome.CRASHED, "table", phase=Phase.STEP, message="boom"),
        Measurement(Outcome.INFRA, "table", message="no port"),
        Measurement(Outcome.OK, "table", tokens_per_s=1e9, peak_reserved_bytes=79 * GIB),
    ],
    ids=["oom", "crashed", "infra", "above the headroom"],
)
def test_a_finalist_that_fails_is_replaced_by_the_next_best(
    sweep: Callable[..., Any], sweeper: Any, everything: Settings, formula: Table, measured: Measurement
) -> None:
    best = ranked(everything, formula)
    result = sweep(everything, lambda candidate: measured if candidate == best[0] else formula(candidate))
    assert result.winner.candidate == best[1]
    assert [record.candidate for record in result.confirmations[:3]] == best[1:4]
    attempts = sweeper.confirmed.count(best[0])
    assert attempts == (3 if measured.outcome is Outcome.INFRA else 1)


def test_finalists_that_we_cannot_measure_end_the_sweep_as_our_trouble(
    sweep: Callable[..., Any], everything: Settings
) -> None:
    with pytest.raises(InfraError, match="in 3 attempts: no port"):
        sweep(everything, lambda candidate: Measurement(Outcome.INFRA, "table", message="no port"))


def test_an_interrupted_final_goes_on_with_what_is_missing(
    sweep: Callable[..., Any], sweeper: Any, everything: Settings, formula: Table
) -> None:
    calls = iter(range(2))

    def interrupted(candidate: Candidate) -> Measurement:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return formula(candidate)

    with pytest.raises(KeyboardInterrupt):
        sweep(everything, interrupted)
    before = sweeper.confirmed[:-1]
    result = sweeper.run(everything)
    assert sweeper.probed == []
    assert before == [Space(everything).baseline, ranked(everything, formula)[0]]
    assert sweeper.confirmed == ranked(everything, formula)[1:3]
    assert result.winner.candidate == before[1]


def test_another_protocol_confirms_anew(sweeper: Any, everything: Settings) -> None:
    sweeper.run(everything)
    everything.probe.confirm_steps = 30
    sweeper.run(everything)
    assert sweeper.probed == []
    assert len(sweeper.confirmed) == 4


def test_where_the_baseline_does_not_fit_the_reference_is_the_nearest_that_does(
    sweeper: Any, settings: Make, formula: Table
) -> None:
    mine = settings(
        zero_stage=[1, 2, 3], offload_optimizer=[None, "cpu"], checkpoint_blocks=["none", "all"], micro_batch=[1, 2]
    )
    sweeper.table = lambda candidate: formula(candidate, 14e9)
    result = sweeper.run(mine)
    baseline = Space(mine).baseline
    assert result.baseline.measurement.outcome is Outcome.OOM_DEVICE
    fitting = [
        record.candidate
        for record in sweeper.rows()
        if record.measurement.outcome is Outcome.OK and record.measurement.used_bytes <= mine.machine.usable_bytes
    ]
    fewest = min(len(candidate.differences(baseline)) for candidate in fitting)
    assert len(result.reference.candidate.differences(baseline)) == fewest
    assert result.reference.confirmation


def test_nothing_that_fits_is_told_with_the_nearest_miss_and_the_ledger(
    sweeper: Any, settings: Make, formula: Table
) -> None:
    mine = settings(zero_stage=[2, 3], checkpoint_blocks=["none", "all"], micro_batch=[2, 4])
    sweeper.table = lambda candidate: formula(candidate, 60e9)
    with pytest.raises(NothingFeasible) as caught:
        sweeper.run(mine)
    nearest = min(
        need for candidate in Space(mine).candidates if (need := formula(candidate, 60e9).needed_bytes) is not None
    )
    assert f"needs at least {nearest / GIB:.2f} GiB of the 76.00 GiB per device" in caught.value.message
    for line in ("oom_device", "oom_device (inferred from a smaller micro-batch)", "8 combinations", "8 candidates"):
        assert line in caught.value.hint
    assert caught.value.exit_code == 3
    assert sweeper.store.study(mine.study_name).winner_trial is None


def test_a_candidate_inside_the_headroom_is_the_nearest_miss(sweeper: Any, settings: Make, formula: Table) -> None:
    mine = settings(zero_stage=[1], micro_batch=[4, 8])
    mine.machine = dataclasses.replace(mine.machine, headroom=0.3)
    sweeper.table = lambda candidate: (
        Measurement(Outcome.TIMEOUT, "table") if candidate.micro_batch == 1 else formula(candidate)
    )
    with pytest.raises(NothingFeasible) as caught:
        sweeper.run(mine)
    assert "needs 72.18 GiB of the 56.00 GiB per device" in caught.value.message
    assert "1 ran, but left too little memory free" in caught.value.hint


def test_where_no_need_is_known_the_commonest_message_is_told(sweeper: Any, settings: Make) -> None:
    sweeper.table = lambda candidate: Measurement(
        Outcome.TIMEOUT, "table", phase=Phase.STEP, message="nothing for 120 s"
    )
    with pytest.raises(NothingFeasible, match="none of the 10 candidates tried is feasible; most often: nothing for"):
        sweeper.run(settings())


class TestRisk:
    """A candidate whose memory creeps loses to one whose memory does not."""

    def test_one_at_risk_loses_to_any_that_is_not_and_the_next_best_takes_its_place(
        self, sweep: Callable[..., Any], sweeper: Any, everything: Settings, formula: Table
    ) -> None:
        best = ranked(everything, formula)
        result = sweep(everything, lambda candidate: risky(formula(candidate), candidate in best[:2]))
        assert result.winner.candidate == best[2]
        assert set(best[:5]) <= set(sweeper.confirmed)
        assert result.winner.measurement.at_risk is None

    def test_it_wins_where_all_are_and_not_every_candidate_is_confirmed_for_that(
        self, sweep: Callable[..., Any], sweeper: Any, everything: Settings, formula: Table
    ) -> None:
        best = ranked(everything, formula)
        result = sweep(everything, lambda candidate: risky(formula(candidate), True))
        assert result.winner.candidate == best[0]
        assert result.winner.measurement.at_risk == "it leaks"
        assert len(sweeper.confirmed) == 2 * everything.objective.finalists + 1  # and the baseline


def risky(measured: Measurement, at_risk: bool) -> Measurement:
    return dataclasses.replace(measured, at_risk="it leaks" if at_risk else None)


class TestParity:
    """A winner trains like the reference."""

    def test_one_that_does_not_is_set_aside_with_a_reason_and_the_next_finalist_wins(
        self, sweep: Callable[..., Any], sweeper: Any, everything: Settings, formula: Table
    ) -> None:
        best = ranked(everything, formula)
        result = sweep(everything, lambda candidate: trained(formula(candidate), 4.0 if candidate in best[:4] else 8.0))
        assert result.winner.candidate == best[4]
        assert [record.candidate for record in result.aside] == best[:4]
        told = [row.measurement.detail.get("parity") for row in sweeper.rows() if row.confirmation]
        assert [found["agrees"] for found in told if found] == [False, False, False, False, True]
        winner = next(row for row in sweeper.rows() if row.trial == result.winner.trial)
        assert winner.measurement.detail["parity"]["reference_trial"] == result.reference.trial

    def test_where_none_trains_like_a_reference_outside_of_the_space_nothing_is_handed_over(
        self, sweep: Callable[..., Any], settings: Make, formula: Table
    ) -> None:
        mine = settings(zero_stage=[2], micro_batch=[1, 2])
        with pytest.raises(NothingFeasible, match="none of the 2 finalists trains as the reference does") as caught:
            sweep(mine, lambda candidate: trained(formula(candidate), float(8 - candidate.zero_stage)))
        assert "its first loss differs" in caught.value.message
        assert "mean over its micro-batch" in caught.value.hint

    def test_batches_that_differ_are_compared_at_their_least_common_multiple(
        self, sweep: Callable[..., Any], sweeper: Any, settings: Make, formula: Table
    ) -> None:
        mine = settings(batch=None, zero_stage=[1], micro_batch=[1, 2, 4], accumulation=[1])
        result = sweep(mine, lambda candidate: trained(formula(candidate), 8.0))
        found = result.winner.measurement.detail["parity"]
        assert found["global_batch"] == 8 * result.winner.candidate.micro_batch
        compared = [request.candidate for request in sweeper.prober.requests if request.steps == 5][-2:]
        assert {c.micro_batch * c.accumulation * 8 for c in compared} == {found["global_batch"]}
        rows = [row for row in sweeper.rows() if "comparison" in row.measurement.detail]
        assert all(row.confirmation for row in rows)
        assert result.counts.probed == 3

    def test_a_comparison_that_cannot_be_made_is_said_and_refuses_nobody(
        self, sweep: Callable[..., Any], settings: Make, formula: Table
    ) -> None:
        mine = settings(batch=None, zero_stage=[1], micro_batch=[1, 4], accumulation=[1])

        def confirmed(candidate: Candidate) -> Measurement:
            if candidate.accumulation > 1:
                return Measurement(Outcome.OOM_DEVICE, "table")
            return trained(formula(candidate), 8.0)

        found = sweep(mine, confirmed).winner.measurement.detail["parity"]
        assert found["agrees"] is None
        assert "the reference could not be probed at the common global batch: oom_device" in found["reason"]


def trained(measured: Measurement, loss: float) -> Measurement:
    return dataclasses.replace(measured, losses=[loss] * 18, gradient_norms=[0.5] * 18)


class TestSlowMoments:
    """What was stopped while the machine was slow is probed again, once, before the finals."""

    @pytest.mark.parametrize(("slower", "tries"), [(2.0, 2), (0.16, 1)])
    def test_a_candidate_that_might_have_won_has_a_second_chance(
        self, sweeper: Any, settings: Make, formula: Table, diary: Any, slower: float, tries: int
    ) -> None:
        mine = settings(zero_stage=[1], micro_batch=[1, 2, 4])
        unlucky, asked = Space(mine).candidates[-1], []

        def table(candidate: Candidate) -> Measurement:
            measured = formula(candidate)
            if candidate == unlucky:
                asked.append(candidate)
            if candidate == unlucky and len(asked) == 1:
                measured.detail["slow_machine"] = slower
                return dataclasses.replace(measured, outcome=Outcome.STOPPED, tokens_per_s=measured.tokens_per_s / 2)
            return measured

        sweeper.table = table
        result = sweeper.run(mine, observer=diary)
        searched = [request for request in sweeper.prober.requests if not request.confirmation]
        assert sum(request.candidate == unlucky for request in searched) == tries
        assert result.counts.probed == 3
