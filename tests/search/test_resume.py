"""A sweep goes on where it stopped, whatever stopped it; other spaces and studies share what is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.candidate import Candidate
from autotune.errors import SettingsError, StoreError
from autotune.probe.measurement import Measurement, Outcome
from autotune.search.trials import Trials
from autotune.settings import Settings
from autotune.space.space import Space
from autotune.store.store import Store
from autotune.workload.phase import Phase

Make = Callable[..., Settings]
Table = Callable[..., Measurement]
RUNNING = optuna.trial.TrialState.RUNNING


class Killed(SystemExit):
    """Stands for kill -9: nothing of ours or of Optuna's catches it."""


def after(count: int, table: Table, error: BaseException) -> Table:
    """A table whose `count`-th look-up is the last."""
    calls = iter(range(count))

    def look_up(candidate: Candidate) -> Measurement:
        if next(calls, None) is None:
            raise error
        return table(candidate)

    return look_up


def states(sweeper: Any) -> list[str]:
    return [trial.state.name for trial in sweeper.search._trials.study.get_trials()]


@pytest.mark.parametrize("search", ["grid", "tpe"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Killed()], ids=["ctrl-c", "killed"])
def test_the_same_command_goes_on_and_repeats_nothing(
    sweeper: Any, settings: Make, formula: Table, search: str, error: BaseException
) -> None:
    sweeper.table = after(3, formula, error)
    with pytest.raises(type(error)):
        sweeper.run(settings(search=search))
    before = sweeper.probed[:-1]
    interrupted = sweeper.probed[-1]
    assert len(before) == 3
    sweeper.table = formula
    result = sweeper.run(settings(search=search))
    assert not set(before) & set(sweeper.probed)
    assert interrupted in sweeper.probed
    assert result.counts.probed == len({*before, *sweeper.probed})
    assert RUNNING.name not in states(sweeper)


def test_a_finished_sweep_probes_nothing_and_gives_the_same_result(sweeper: Any, settings: Make) -> None:
    first = sweeper.run(settings())
    again = sweeper.run(settings())
    assert sweeper.prober.requests == []
    assert (again.winner, again.reference, again.gain) == (first.winner, first.reference, first.gain)


def test_a_larger_budget_goes_on(sweeper: Any, large: Make) -> None:
    sweeper.run(large(probes=8))
    before = set(sweeper.probed)
    result = sweeper.run(large(probes=11))
    assert len(sweeper.probed) == 3
    assert not before & set(sweeper.probed)
    assert result.counts.probed == 11


@pytest.mark.parametrize("where", ["before the constraint", "before the tell", "after a stopped probe"])
def test_a_kill_between_our_transaction_and_optunas_is_made_good(
    sweeper: Any, settings: Make, formula: Table, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    mine = settings(search="tpe", probes=6)
    finish = Trials.finish
    count = iter(range(100))

    def kill_at_the_third(self: Trials, number: int, told: Any) -> None:
        if next(count) != 2:
            return finish(self, number, told)
        with monkeypatch.context() as inner:
            if where == "before the constraint":
                inner.setattr(optuna.trial.Trial, "set_constraint", killed)
            else:
                inner.setattr(optuna.Study, "tell", killed)
            return finish(self, number, told)

    def killed(*arguments: Any, **named: Any) -> None:
        raise Killed

    if where == "after a stopped probe":
        sweeper.table = lambda candidate: Measurement(
            Outcome.STOPPED if candidate != Space(mine).baseline else Outcome.OK, "table", tokens_per_s=10.0
        )
    with monkeypatch.context() as patch:
        patch.setattr(Trials, "finish", kill_at_the_third)
        with pytest.raises(Killed):
            sweeper.run(mine)
    row = sweeper.rows()[-1]
    trials = sweeper.search._trials.study.get_trials()
    assert trials[row.optuna_number].state is RUNNING
    result = sweeper.run(mine)
    assert row.candidate not in sweeper.probed
    trial = sweeper.search._trials.study.get_trials()[row.optuna_number]
    told = sweeper.search._told(row)
    assert (trial.state, trial.value) == (told.state, told.value)
    assert trial.constraints == {"memory": told.constraint}
    assert result.counts.probed == 6


def test_a_killed_process_leaves_a_study_that_goes_on(sweeper: Any, url: str, settings: Make, tmp_path: Path) -> None:
    """The same with a real kill -9, in the middle of a probe."""
    code = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("formula", {str(Path(__file__).with_name("conftest.py"))!r})
formula = importlib.util.module_from_spec(spec)
sys.modules["formula"] = formula
spec.loader.exec_module(formula)
calls = iter(range(3))
def table(candidate):
    if next(calls, None) is None:
        os.kill(os.getpid(), 9)
    return formula.measure(candidate)
settings = formula.make_settings(zero_stage=[1, 2], micro_batch=[1, 2, 4, 8, 16], offload_optimizer=None,
    offload_param=None, checkpoint_blocks="none", checkpoint_part="whole", checkpoint_input="device")
formula.Sweeper(formula.Store.open({url!r}), table).run(settings)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    before = [record.candidate for record in sweeper.rows()]
    assert len(before) == 3
    result = sweeper.run(settings())
    assert not set(before) & set(sweeper.probed)
    assert result.counts.probed == len(before) + len(sweeper.probed)
    assert RUNNING.name not in states(sweeper)


def test_a_store_that_fails_in_the_middle_is_a_store_error_and_loses_nothing(
    sweeper: Any, settings: Make, formula: Table, url: str, tmp_path: Path
) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    aside = path.with_suffix(".aside")

    def table(candidate: Candidate) -> Measurement:
        if len(sweeper.prober.requests) == 3:
            path.rename(aside)
            path.mkdir()  # the next write cannot open its journal beside it
            (path / "in the way").touch()
            sweeper.store._engine.dispose()
            sweeper.store.optuna_storage().engine.dispose()
        return formula(candidate)

    mine = settings()
    mine.output = str(tmp_path)
    sweeper.table = table
    with pytest.raises(StoreError, match="cannot be opened") as caught:
        sweeper.run(mine)
    [kept] = (tmp_path / mine.study_name).glob("spool-*.jsonl")
    assert str(kept) in caught.value.hint
    (path / "in the way").unlink()
    path.rmdir()
    aside.rename(path)
    sweeper.table = formula
    before = sweeper.prober.requests[-1].candidate
    assert len(sweeper.rows()) == 2
    assert sweeper.run(mine).reason == "every candidate is tried"
    assert sweeper.rows()[2].candidate == before
    assert before not in sweeper.probed
    assert not kept.exists()


def test_another_space_of_the_study_begins_with_what_is_known(sweeper: Any, settings: Make) -> None:
    sweeper.run(settings())
    known = {record.candidate for record in sweeper.rows()}
    wider = settings(zero_stage=[1, 2, 3], micro_batch=[1, 2, 4])
    result = sweeper.run(wider)
    assert sweeper.probed
    assert all(candidate.zero_stage == 3 for candidate in sweeper.probed)
    told = {sweeper.search._trials._candidate(trial) for trial in sweeper.search._trials._finished()}
    assert told == set(Space(wider).candidates)
    assert {candidate for candidate in known if candidate in Space(wider)} < told
    assert result.counts.probed == len(sweeper.probed)
    names = optuna.get_all_study_names(sweeper.store.optuna_storage())
    assert len(names) == 2
    assert all(name.startswith("formula-table-1x8/") for name in names)


def test_a_probe_that_was_stopped_is_tried_again_where_it_might_win(sweeper: Any, settings: Make) -> None:
    sweeper.run(settings(zero_stage=[1, 3], micro_batch=[1, 2, 4]))
    stopped = {r.candidate for r in sweeper.rows() if r.measurement.outcome is Outcome.STOPPED}
    assert any(candidate.zero_stage == 3 for candidate in stopped)
    result = sweeper.run(settings(zero_stage=3, micro_batch=[1, 2, 4]))
    assert result.winner.candidate.zero_stage == 3
    assert result.winner.candidate in stopped


def test_another_study_takes_over_what_was_measured_under_equal_conditions(
    sweeper: Any, settings: Make, formula: Table
) -> None:
    first = sweeper.run(settings(), environment={"torch": "2.13"})
    other = settings()
    other.study.name = "other"
    result = sweeper.run(other, environment={"torch": "2.13"})
    again = {r.candidate for r in sweeper.rows() if r.measurement.outcome is Outcome.STOPPED}
    assert set(sweeper.probed) == again  # stopped says nothing lasting
    reused = [record for record in sweeper.rows("other") if record.reused and not record.confirmation]
    assert len(reused) == result.counts.reused > 0
    assert sweeper.confirmed  # something was probed meanwhile: finalists are compared as they are now
    assert result.winner.candidate == first.winner.candidate
    third = settings()
    third.study.name = "third"
    assert sweeper.run(third, environment={"torch": "2.14"}).counts.reused == 0


def test_another_workload_in_the_same_study_is_refused_before_anything_is_probed(sweeper: Any, settings: Make) -> None:
    sweeper.run(settings())
    with pytest.raises(SettingsError, match=r"workload\.global_batch 512 → 256"):
        sweeper.run(settings(batch=256))
    assert sweeper.prober.requests == []


def test_another_headroom_decides_anew_and_measures_nothing_twice(sweeper: Any, settings: Make) -> None:
    mine = settings()
    mine.probe.stop_losers = False
    wide = sweeper.run(mine)
    used = wide.winner.measurement.used_bytes
    import dataclasses

    tight = settings()
    tight.probe.stop_losers = False
    tight.machine = dataclasses.replace(tight.machine, headroom=1 - 0.99 * used / tight.machine.device_memory_bytes)
    result = sweeper.run(tight)
    assert sweeper.probed == []
    assert result.winner.candidate != wide.winner.candidate
    assert result.winner.measurement.used_bytes < used


def test_what_failed_with_other_versions_is_tried_again(sweeper: Any, settings: Make, formula: Table) -> None:
    bad = Space(settings()).candidates[1]
    invalid = Measurement(Outcome.INVALID, "table", phase=Phase.INIT, message="DeepSpeed says no")
    sweeper.table = lambda candidate: invalid if candidate == bad else formula(candidate)
    sweeper.run(settings(), environment={"deepspeed": "0.19.8"})
    sweeper.run(settings(), environment={"deepspeed": "0.19.8"})
    assert sweeper.probed == []
    sweeper.table = formula
    sweeper.run(settings(), environment={"deepspeed": "0.20.0"})
    assert sweeper.probed == [bad]


def test_the_study_of_a_dead_process_is_taken_over(sweeper: Any, settings: Make, url: str) -> None:
    code = """
import os, sys
from autotune.store.store import Store
store = Store.open(sys.argv[1])
store.crew("formula-table-1x8").join()
os._exit(0)
"""
    mine = settings()
    sweeper.store.open_study(mine.study_name, mine.workload, mine.machine)
    subprocess.run([sys.executable, "-c", code, url], check=True, env=os.environ)
    assert sweeper.run(mine).winner
    assert Store.open(url).study(mine.study_name).winner_trial
