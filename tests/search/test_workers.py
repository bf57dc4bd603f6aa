"""Several real processes on one study in a real PostgreSQL, some of which die, and so does the server."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autotune.probe.measurement import Outcome
from autotune.space.space import Space
from autotune.store.records import ProbeRecord
from autotune.store.store import Store
from tests.commands import Run, start
from tests.postgres import Server
from tests.search.table_worker import settings

pytestmark = pytest.mark.probes

SCRIPT = Path(__file__).with_name("table_worker.py")
STUDY = "formula-table-1x8"
Work = Callable[..., Run]


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.database()


@pytest.fixture
def work(url: str, tmp_path: Path) -> Iterator[Work]:
    """Starts a worker whose probes take so many seconds; none outlives the test."""
    runs: list[Run] = []

    def begin(seconds: float, *options: str) -> Run:
        runs.append(start([sys.executable, str(SCRIPT), url, str(tmp_path), str(seconds), *options], tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        for process in run.living():
            process.kill()
        run.process.communicate()


def stored(url: str, at_least: int) -> list[ProbeRecord]:
    """The probes, once there are so many."""
    store = Store.open(url)
    deadline = time.monotonic() + 60
    try:
        while len(rows := _rows(store)) < at_least:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return rows
    finally:
        store.close()


def _rows(store: Store) -> list[ProbeRecord]:
    return store.probes(STUDY)


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    store = Store.open(url)
    storage = store.optuna_storage()
    [name] = optuna.get_all_study_names(storage)
    found = optuna.load_study(study_name=name, storage=storage).get_trials()
    store.close()
    return found


def test_four_workers_share_sixty_candidates_though_one_is_killed_and_the_server_crashes(
    postgres: Server, url: str, work: Work
) -> None:
    workers = [work(0.1) for _ in range(4)]  # on an empty database, together
    victim = workers.pop()
    victim.until("probing")
    victim.until("probing")  # the first is stored, the second under way
    victim.process.kill()
    victim.finish()
    stored(url, 15)
    postgres.restart("immediate")
    stored(url, 30)
    postgres.restart()
    ends = [run.finish() for run in workers]
    assert [run.code for run in ends] == [0, 0, 0], [run.err for run in ends]
    results = [json.loads(run.out) for run in ends]
    rows = stored(url, 60)
    searched = Counter(row.key for row in rows if not row.confirmation)
    assert searched.keys() == {candidate.key for candidate in Space(settings()).candidates}
    assert set(searched.values()) == {1}
    assert len({row.worker for row in rows if not row.confirmation}) == 4
    assert set(Counter(row.key for row in rows if row.confirmation).values()) == {1}
    assert len({result["winner"] for result in results}) == 1
    assert all("elsewhere" in run.err for run in ends)
    states = Counter(trial.state for trial in trials(url))
    assert states[TrialState.RUNNING] == states[TrialState.WAITING] == 0
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == 60


def test_workers_that_sample_share_one_budget_and_probe_nothing_twice(url: str, work: Work) -> None:
    ends = [run.finish() for run in [work(0.05, 'search="tpe"', "probes=24") for _ in range(3)]]
    assert [run.code for run in ends] == [0, 0, 0], [run.err for run in ends]
    rows = stored(url, 1)
    probed = Counter(row.key for row in rows if not (row.confirmation or row.inferred))
    assert probed.total() == 24
    assert set(probed.values()) == {1}
    assert len({json.loads(run.out)["winner"] for run in ends}) == 1


def test_a_candidate_that_workers_die_of_is_given_up_after_two(url: str, work: Work) -> None:
    for _ in range(2):
        victim = work(30.0, "heartbeat_s=0.2")
        victim.until("probing")
        victim.process.kill()
        victim.finish()
    last = work(0.0).finish()
    assert last.code == 0, last.err
    baseline = Space(settings()).baseline
    [given_up] = [row for row in stored(url, 60) if row.candidate == baseline]
    assert given_up.measurement.outcome is Outcome.INFRA
    assert "2 workers died" in (given_up.measurement.message or "")
    assert f"probing {baseline.key}" not in last.err


def test_a_stopped_worker_is_gone_on_without_and_what_it_brings_late_is_dropped(url: str, work: Work) -> None:
    stopped = work(0.3, "heartbeat_s=0.3")
    stopped.until("probing")
    stopped.process.send_signal(signal.SIGSTOP)
    other = work(0.02, "heartbeat_s=0.3").finish()
    assert other.code == 0, other.err
    rows = stored(url, 60)
    stopped.process.send_signal(signal.SIGCONT)
    stopped.finish()
    assert stopped.code == 0, stopped.err
    assert "took this one for dead" in stopped.err
    assert json.loads(stopped.out)["winner"] == json.loads(other.out)["winner"]
    assert stored(url, 60) == rows
    assert TrialState.RUNNING not in {trial.state for trial in trials(url)}


def test_a_lost_database_ends_a_worker_with_what_it_measured_in_a_file_that_the_next_takes_in(
    postgres: Server, url: str, work: Work, tmp_path: Path
) -> None:
    worker = work(1.0, "reconnect_s=0.5")
    worker.until("probing")
    worker.until("probing")
    postgres.stop("immediate")
    try:
        worker.finish()
    finally:
        postgres.start()
    assert worker.code == 5, worker.err
    [kept] = (tmp_path / STUDY).glob("spool-*.jsonl")
    assert str(kept) in worker.err
    assert "asked again for 0.5 s" in worker.err
    [spooled] = [json.loads(line)["row"] for line in kept.read_text().splitlines()]
    assert spooled["key"] not in {row.key for row in stored(url, 1)}
    following = work(0.0).finish()
    assert following.code == 0, following.err
    assert not kept.exists()
    assert f"probing {spooled['key']}" not in following.err
    rows = [row for row in stored(url, 60) if not row.confirmation]
    assert [row.measurement.wall_s for row in rows if row.key == spooled["key"]] == [spooled["wall_s"]]
    assert set(Counter(row.key for row in rows).values()) == {1}
