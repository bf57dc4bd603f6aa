"""A sweep over a table: what is tried, what is not, when it ends."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest

from autotune.candidate import Candidate
from autotune.errors import InfraError, NothingFeasible, SettingsError, StoreError
from autotune.probe.measurement import Measurement, Outcome
from autotune.settings import Settings
from autotune.space.space import Space
from autotune.store.store import Store
from autotune.workload.phase import Phase

Make = Callable[..., Settings]
Table = Callable[..., Measurement]
INFRA = Measurement(Outcome.INFRA, "table", message="the port is taken")


def crashed(message: str = "RuntimeError: boom", phase: Phase = Phase.FORWARD) -> Measurement:
    return Measurement(Outcome.CRASHED, "table", phase=phase, message=message)


class Times:
    """Counts how often each candidate is asked for."""

    def __init__(self, table: Callable[[Candidate, int], Measurement]) -> None:
        self.seen: Counter[Candidate] = Counter()
        self._table = table

    def __call__(self, candidate: Candidate) -> Measurement:
        self.seen[candidate] += 1
        return self._table(candidate, self.seen[candidate])


def test_a_list_is_tried_whole_the_baseline_first_and_the_fastest_that_fits_wins(
    sweeper: Any, settings: Make, formula: Table
) -> None:
    mine = settings()
    result = sweeper.run(mine)
    candidates = Space(mine).candidates
    assert sweeper.probed[0] == Space(mine).baseline
    tried = {record.candidate for record in sweeper.rows() if not record.confirmation}
    assert tried == set(candidates)
    fitting = [
        measured.tokens_per_s
        for measured in map(formula, candidates)
        if measured.outcome is Outcome.OK and measured.used_bytes <= mine.machine.usable_bytes
    ]
    assert result.winner.measurement.tokens_per_s == max(fitting)
    assert result.winner.confirmation
    assert result.reason == "every candidate is tried"
    assert sweeper.store.study(mine.study_name).winner_trial == result.winner.trial
    assert sweeper.store.study(mine.study_name).baseline_key == Space(mine).baseline.key


def test_an_oom_spares_every_larger_micro_batch_its_process(sweeper: Any, settings: Make) -> None:
    result = sweeper.run(settings())
    inferred = [record for record in sweeper.rows() if record.inferred]
    assert inferred
    assert result.counts.inferred == len(inferred)
    assert {record.candidate for record in inferred}.isdisjoint(sweeper.probed)
    for record in inferred:
        assert record.measurement.outcome is Outcome.OOM_DEVICE
        trial = sweeper.search._trials.study.get_trials()[record.optuna_number]
        assert trial.state is optuna.trial.TrialState.PRUNED
        assert trial.constraints["memory"] > 0


def test_every_finished_trial_has_the_one_constraint(sweeper: Any, large: Make) -> None:
    sweeper.run(large(probes=15))
    trials = sweeper.search._trials.study.get_trials()
    assert trials
    assert all(list(trial.constraints) == ["memory"] for trial in trials if trial.state.is_finished())


def test_the_budget_counts_processes_and_nothing_else(sweeper: Any, large: Make) -> None:
    result = sweeper.run(large(probes=12))
    assert len(sweeper.probed) == result.counts.probed == 12
    assert len(set(sweeper.probed)) == 12
    assert result.reason == "budget.probes=12 is spent"


@pytest.mark.parametrize("search", ["tpe", "random", "grid"])
def test_every_search_tries_a_small_space_whole_and_ends(sweeper: Any, settings: Make, search: str) -> None:
    mine = settings(search=search, probes=40)
    result = sweeper.run(mine)
    assert result.reason == "every candidate is tried"
    tried = Counter(record.candidate for record in sweeper.rows() if not record.confirmation)
    assert set(tried) == set(Space(mine).candidates)
    assert set(tried.values()) == {1}


def test_repeats_of_a_sampler_are_pruned_and_cost_nothing(sweeper: Any, settings: Make) -> None:
    result = sweeper.run(settings(search="tpe", probes=9))
    assert result.counts.repeats > 0
    states = Counter(trial.state.name for trial in sweeper.search._trials.study.get_trials())
    assert states["FAIL"] == 0
    assert states["PRUNED"] >= result.counts.repeats
    in_a_row = longest = 0
    numbers = {record.optuna_number for record in sweeper.rows()}
    for trial in sweeper.search._trials.study.get_trials():
        in_a_row = 0 if trial.number in numbers else in_a_row + 1
        longest = max(longest, in_a_row)
    assert longest <= 5


def test_time_ends_a_sweep_between_probes(sweeper: Any, settings: Make) -> None:
    now = iter(range(0, 10_000, 60))
    mine = settings()
    mine.budget.minutes = 3
    result = sweeper.run(mine, clock=lambda: next(now))
    assert result.reason == "budget.minutes=3 are over"
    assert 0 < len(sweeper.probed) < 5


def test_patience_ends_a_sweep_that_finds_nothing_better(sweeper: Any, large: Make) -> None:
    mine = large(probes=200)
    mine.search.patience = 6
    result = sweeper.run(mine)
    assert result.reason == "6 probes without a better one (search.patience)"
    speeds = [record.measurement.tokens_per_s or 0 for record in sweeper.rows() if not record.confirmation]
    assert max(speeds[:-6]) == max(speeds)


def test_probes_are_told_what_they_must_beat(sweeper: Any, settings: Make) -> None:
    sweeper.run(settings())
    searched = [request for request in sweeper.prober.requests if not request.confirmation]
    assert searched[0].stop_below_tokens_per_s is None
    bounds = [request.stop_below_tokens_per_s for request in searched[1:]]
    assert bounds == sorted(bounds)
    assert bounds[-1] == max(record.measurement.tokens_per_s or 0 for record in sweeper.rows() if record.confirmation)


def test_losers_run_to_their_end_where_the_settings_say_so(sweeper: Any, settings: Make) -> None:
    mine = settings()
    mine.probe.stop_losers = False
    result = sweeper.run(mine)
    assert all(request.stop_below_tokens_per_s is None for request in sweeper.prober.requests)
    assert "stopped" not in result.counts.outcomes


def test_candidates_that_cannot_run_here_are_never_tried(sweeper: Any, settings: Make, diary: Any) -> None:
    def impossible(candidate: Candidate) -> str | None:
        return "stage 2 needs 3 TiB of host memory" if candidate.zero_stage == 2 else None

    sweeper.run(settings(), impossible=impossible, observer=diary)
    assert all(candidate.zero_stage == 1 for candidate in sweeper.probed)
    [(overview,)] = diary.of("started")
    assert overview.impossible == {"stage 2 needs 3 TiB of host memory": 5}
    assert overview.candidates == 5


def test_a_space_that_cannot_run_here_is_refused_with_what_it_needs(sweeper: Any, settings: Make) -> None:
    with pytest.raises(NothingFeasible) as caught:
        sweeper.run(settings(), impossible=lambda candidate: "the states take 300 GiB, and this machine has 16 GiB")
    assert "none of the 10 candidates can run: the states take 300 GiB" in caught.value.message
    assert "machine=" in caught.value.hint
    assert caught.value.exit_code == 3


def test_our_own_trouble_is_retried_and_teaches_nothing(sweeper: Any, settings: Make, formula: Table) -> None:
    sweeper.table = Times(lambda candidate, time: INFRA if time <= 2 else formula(candidate))
    result = sweeper.run(settings())
    assert result.reason == "every candidate is tried"
    trials = sweeper.search._trials.study.get_trials()
    failed = [trial for trial in trials if trial.state is optuna.trial.TrialState.FAIL]
    infra = [record for record in sweeper.rows() if record.measurement.outcome is Outcome.INFRA]
    assert len([record for record in infra if not record.confirmation]) == len(failed) == 2 * result.counts.probed
    assert not any(trial.constraints for trial in failed)


def test_a_third_failure_of_ours_ends_the_sweep_and_keeps_everything(
    sweeper: Any, settings: Make, formula: Table
) -> None:
    mine = settings()
    bad = Space(mine).candidates[2]
    sweeper.table = lambda candidate: INFRA if candidate == bad else formula(candidate)
    with pytest.raises(InfraError, match=r"in 3 attempts: the port is taken") as caught:
        sweeper.run(mine)
    assert caught.value.exit_code == 4
    outcomes = [record.measurement.outcome.value for record in sweeper.rows()]
    assert outcomes == ["ok", "ok", "infra", "infra", "infra"]
    sweeper.table = formula
    assert sweeper.run(mine).reason == "every candidate is tried"
    assert sweeper.probed[0] == bad


def test_a_crash_is_tried_once_more_and_the_second_counts(sweeper: Any, settings: Make, formula: Table) -> None:
    mine = settings()
    once, always = Space(mine).candidates[1:3]

    def table(candidate: Candidate, time: int) -> Measurement:
        return crashed() if candidate == always or (candidate == once and time == 1) else formula(candidate)

    sweeper.table = times = Times(table)
    result = sweeper.run(mine)
    assert (times.seen[once], times.seen[always]) == (2 + (once in sweeper.confirmed), 2)
    assert result.counts.outcomes["crashed"] == 1
    told = {sweeper.search._trials._candidate(trial): trial for trial in sweeper.search._trials._finished()}
    assert told[once].constraints["memory"] <= 0
    assert told[always].constraints["memory"] == 1.0
    assert told[always].state is optuna.trial.TrialState.COMPLETE


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.INVALID])
def test_a_model_that_fails_in_itself_ends_the_sweep_at_once(sweeper: Any, settings: Make, outcome: Outcome) -> None:
    serial = iter(range(100))

    def table(candidate: Candidate) -> Measurement:
        return Measurement(
            outcome, "table", phase=Phase.FORWARD, message=f"TypeError: <object at 0x{next(serial):x}> is no tensor"
        )

    sweeper.table = table
    with pytest.raises(SettingsError, match="the model itself fails, in forward: TypeError") as caught:
        sweeper.run(settings())
    assert caught.value.exit_code == 2
    assert len(sweeper.probed) == (3 if outcome is Outcome.CRASHED else 2)


@pytest.mark.parametrize(
    "second",
    [crashed("ValueError: another"), crashed(phase=Phase.STEP), Measurement(Outcome.OOM_DEVICE, "table")],
    ids=["another message", "a later phase", "an OOM"],
)
def test_two_candidates_that_fail_differently_say_nothing_about_the_model(
    sweeper: Any, settings: Make, formula: Table, second: Measurement
) -> None:
    one, two = Space(settings()).candidates[:2]
    sweeper.table = lambda candidate: {one: crashed(), two: second}.get(candidate) or formula(candidate)
    assert sweeper.run(settings()).winner.candidate not in (one, two)


def test_a_model_fails_in_itself_also_where_some_candidates_fail_before_they_come_to_it(
    sweeper: Any, settings: Make
) -> None:
    mine = settings()
    second, third, *_ = (candidate for candidate in Space(mine).candidates if candidate != Space(mine).baseline)
    earlier = crashed("no such part", phase=Phase.LOAD)
    sweeper.table = lambda candidate: earlier if candidate in (second, third) else crashed("the model's own")
    with pytest.raises(SettingsError, match="the model itself fails, in forward: the model's own"):
        sweeper.run(mine)
    assert len(set(sweeper.probed)) == 4


def test_a_baseline_outside_the_space_is_measured_and_cannot_win(sweeper: Any, settings: Make) -> None:
    mine = settings(zero_stage=[2], micro_batch=[1, 2], checkpoint_blocks="all")
    result = sweeper.run(mine)
    assert sweeper.probed[0] == Space(mine).baseline
    assert Space(mine).baseline not in Space(mine)
    assert result.reference.candidate == result.baseline.candidate == Space(mine).baseline
    assert result.winner.candidate in Space(mine)
    assert result.gain < 1  # the pinned space is slower, and something wins it nevertheless


def test_a_list_that_fits_the_budget_only_without_the_outside_baseline_is_sampled(
    sweeper: Any, settings: Make, diary: Any
) -> None:
    mine = settings(zero_stage=[2], micro_batch=[1, 2], checkpoint_blocks="all")
    mine.budget.probes = 2
    sweeper.run(mine, observer=diary)
    [(overview,)] = diary.of("started")
    assert (overview.sampler, overview.candidates, len(sweeper.probed)) == ("tpe", 2, 2)


def test_a_spent_budget_ends_a_sweep_though_its_outside_baseline_is_open_again(
    sweeper: Any, settings: Make, formula: Callable[[Candidate], Measurement]
) -> None:
    def pinned(probes: int) -> Settings:
        made = settings(zero_stage=[2], micro_batch=[1, 2, 4], checkpoint_blocks="all")
        made.budget.probes = probes
        return made

    baseline = Space(pinned(3)).baseline
    sweeper.table = lambda candidate: crashed() if candidate == baseline else formula(candidate)
    assert sweeper.run(pinned(3))
    later = pinned(2)
    later.probe.steps += 1  # a failure under another protocol settles nothing
    assert sweeper.run(later).reason == "budget.probes=2 is spent"


def test_a_running_tuner_is_not_joined(sweeper: Any, settings: Make, url: str) -> None:
    sweeper.run(settings())
    known = sweeper.store.study("formula-table-1x8")
    other = settings()
    other.machine = dataclasses.replace(other.machine, headroom=0.5)
    running = Store.open(url)
    running.crew("formula-table-1x8").join()
    with pytest.raises(StoreError, match=f"is being tuned by process {os.getpid()} on {socket.gethostname()}"):
        sweeper.run(other)
    assert not sweeper.prober.requests
    assert sweeper.store.study("formula-table-1x8") == known
    running.close()
    assert sweeper.run(other)


def test_the_study_is_free_again_after_any_end(sweeper: Any, settings: Make, url: str) -> None:
    sweeper.run(settings())
    sweeper.table = lambda candidate: INFRA
    with pytest.raises(InfraError):
        sweeper.run(settings(zero_stage=3))
    other = Store.open(url)
    other.crew("formula-table-1x8").join()
    other.close()


def test_an_observer_hears_everything_in_order(sweeper: Any, settings: Make, diary: Any) -> None:
    result = sweeper.run(settings(), observer=diary)
    kinds = [entry[0] for entry in diary.entries]
    assert kinds[:3] == ["started", "probing", "finished"]
    assert [record for (record,) in diary.of("finished")] == sweeper.rows()
    assert [candidate for candidate, _, _ in diary.of("probing")] == sweeper.probed
    assert [number for _, number, _ in diary.of("probing")] == list(range(1, result.counts.probed + 1))
    assert [candidate for candidate, _, _ in diary.of("confirming")] == sweeper.confirmed
    assert kinds.index("searched") < kinds.index("confirming")
    left = [left for _, _, left in diary.of("probing")]
    assert left == sorted(left, reverse=True)


@pytest.fixture
def verbosity() -> Iterator[int]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    yield optuna.logging.INFO
    optuna.logging.set_verbosity(before)


def test_optuna_keeps_quiet_and_is_left_as_it_was(
    sweeper: Any, settings: Make, verbosity: int, capfd: pytest.CaptureFixture[str]
) -> None:
    sweeper.table = lambda candidate: crashed(f"boom {candidate}")
    with pytest.raises(NothingFeasible):
        sweeper.run(settings())
    assert optuna.logging.get_verbosity() == verbosity
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_search_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, autotune.search.search, autotune.store.store; print({'torch', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
