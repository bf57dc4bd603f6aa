"""Several workers on one study: nobody takes what another has, and the dead are noticed."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from sqlalchemy import insert, update

from autotune.candidate import Candidate
from autotune.errors import InfraError, SettingsError, StoreError
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.process import Identity, this_place
from autotune.store import crew as crew_module
from autotune.store.claims import Claim, ClaimLost, Refused
from autotune.store.crew import Crew
from autotune.store.engine import now
from autotune.store.store import Store
from autotune.store.tables import workers
from autotune.store.worker import Worker
from autotune.workload.workload import Workload
from tests.postgres import Server

Open = Callable[..., Store]
Enter = Callable[..., Worker]
CANDIDATE = Candidate(micro_batch=1, accumulation=16, zero_stage=1, precision="bf16")
OK = Measurement(Outcome.OK, "table", tokens_per_s=100.0)


@pytest.fixture
def store(url: str, opened: Open, workload: Workload, machine: Machine) -> Store:
    store = opened(url)
    store.open_study("s", workload, machine)
    return store


@pytest.fixture
def crews(url: str, store: Store, opened: Open) -> Callable[..., Crew]:
    """Makes workers of one family, which may share a SQLite file too; none of them beats by itself."""

    def make(sweep: str = "s/x") -> Crew:
        crew = opened(url).crew("s", "family", heartbeat_s=1000.0)
        crew.join()
        crew.begin(sweep, "")
        return crew

    return make


@pytest.fixture
def enter(store: Store) -> Enter:
    """Writes a worker down, as another process would."""

    def write(pid: int, started: float, silent_s: float = 0.0, **more: Any) -> Worker:
        worker = Worker(uuid.uuid4().hex, pid=pid, started=started, **({"family": "another"} | more))
        with store.writing() as connection:
            moment = now(connection) - silent_s
            row = worker.row() | {"study": "s", "sweep": "s/x", "searching": True, "started": moment}
            connection.execute(insert(workers).values(row | {"heartbeat": moment}))
        return worker

    return write


@pytest.fixture
def neighbour() -> Iterator[psutil.Process]:
    """Another live process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def gone() -> dict[str, Any]:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return {"pid": child.pid, "started": Identity.here().started}


def living(process: psutil.Process) -> dict[str, Any]:
    identity = Identity.of(process.pid)
    return {"pid": process.pid, "started": identity.started if identity else Identity.here().started}


# -- one command on a file ------------------------------------------------------------------------------------------


@pytest.fixture
def file_store(file_url: str, opened: Open, workload: Workload, machine: Machine) -> Store:
    store = opened(file_url)
    store.open_study("s", workload, machine)
    return store


def test_a_second_command_on_a_file_is_refused_with_the_first_ones_pid_and_host(
    file_store: Store, file_url: str, opened: Open
) -> None:
    file_store.crew("s").join()
    with pytest.raises(StoreError) as caught:
        opened(file_url).crew("s").join()
    assert caught.value.message == f"study s is being tuned by process {os.getpid()} on {socket.gethostname()}"
    assert caught.value.exit_code == 5
    file_store.crew("s").leave()
    opened(file_url).crew("s").join()


def test_workers_of_one_command_share_a_file(file_store: Store, file_url: str, opened: Open) -> None:
    file_store.crew("s", "family").join()
    opened(file_url).crew("s", "family").join()


@pytest.mark.parametrize("how", ["gone", "another start", "zombie"])
def test_a_dead_command_is_taken_over_at_once(
    file_store: Store, neighbour: psutil.Process, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    known = {"pid": child.pid, "started": Identity.here().started}
    if how == "another start":
        known = {"pid": neighbour.pid, "started": Identity.here().started - 1}
    if how == "zombie":
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        known = living(psutil.Process(child.pid))
    else:
        child.wait()
    with file_store.writing() as connection:
        row = Worker("1", "another", **known).row() | {"study": "s", "searching": True, "started": 0.0}
        connection.execute(insert(workers).values(row | {"heartbeat": now(connection)}))
    file_store.crew("s").join()
    child.wait()


def test_a_command_on_another_host_is_believed_until_it_has_been_silent_for_long(file_store: Store) -> None:
    with file_store.writing() as connection:
        worker = Worker("1", "another", "far away", "another place", 1, 0.0)
        row = worker.row() | {"study": "s", "searching": True, "started": 0.0, "heartbeat": now(connection) - 60}
        connection.execute(insert(workers).values(row))
    with pytest.raises(StoreError, match="on far away") as caught:
        file_store.crew("s").join()
    assert "free in 5 min" in caught.value.hint
    with file_store.writing() as connection:
        connection.execute(update(workers).values(heartbeat=now(connection) - 361))
    file_store.crew("s").join()


def test_an_empty_study_that_another_process_works_on_keeps_its_workload(
    store: Store, enter: Enter, neighbour: psutil.Process, workload: Workload, machine: Machine
) -> None:
    enter(**living(neighbour))
    with pytest.raises(SettingsError, match="holds another workload"):
        store.open_study("s", dataclasses.replace(workload, seq_len=256), machine)


# -- claims ---------------------------------------------------------------------------------------------------------


def test_a_candidate_is_claimed_by_one_worker(crews: Callable[..., Crew]) -> None:
    one, two = crews(), crews()
    claim = one.claim_probe("a", seen=0, left=9)
    assert isinstance(claim, Claim)
    assert one.claim_probe("a", seen=0, left=9) == claim  # asked again: the answer had been lost
    assert two.claim_probe("a", seen=0, left=9) is Refused.TAKEN
    assert (two.look().taken, two.look().in_flight) == ({"a"}, 1)
    one.release(claim)
    assert isinstance(two.claim_probe("a", seen=0, left=9), Claim)


def test_no_claim_without_having_seen_what_is_stored(crews: Callable[..., Crew], store: Store) -> None:
    one, two = crews(), crews()
    claim = one.claim_probe(CANDIDATE.key, seen=0, left=9)
    assert isinstance(claim, Claim)
    store.add_row(_row(), claim)
    assert two.claim_probe(CANDIDATE.key, seen=0, left=9) is Refused.STALE
    assert two.look().taken == frozenset()


def test_what_is_in_flight_counts_against_the_budget(crews: Callable[..., Crew]) -> None:
    one, two, elsewhere = crews(), crews(), crews("s/another space")
    assert isinstance(one.claim_probe("a", seen=0, left=1), Claim)
    assert two.claim_probe("b", seen=0, left=1) is Refused.FULL
    assert isinstance(elsewhere.claim_probe("b", seen=0, left=1), Claim)


def test_a_workers_death_makes_orphans_which_are_tried_once_more(crews: Callable[..., Crew], enter: Enter) -> None:
    one, two = crews(), crews()
    for attempt in (1, 2):
        dying = crews()
        claim = dying.claim_probe("a", seen=0, left=9)
        assert isinstance(claim, Claim)
        assert claim.attempt == attempt
        _kill(dying)
        view = one.look()
        assert view.buried
        assert [(orphan.key, orphan.attempt) for orphan in view.orphans] == [("a", attempt)]
        assert not two.look().buried
    assert two.claim_probe("a", seen=0, left=9) is Refused.DEADLY


def test_what_a_worker_brings_after_its_claim_was_taken_over_is_not_kept(
    crews: Callable[..., Crew], store: Store
) -> None:
    stopped, other = crews(), crews()
    late = stopped.claim_probe(CANDIDATE.key, seen=0, left=9)
    _kill(stopped)
    other.look()
    claim = other.claim_probe(CANDIDATE.key, seen=0, left=9)
    assert isinstance(late, Claim)
    assert isinstance(claim, Claim)
    with pytest.raises(ClaimLost):
        store.add_row(_row(), late)
    assert store.add_row(_row(), claim).trial == 1
    with pytest.raises(ClaimLost):
        store.add_row(_row(), late)
    assert len(store.probes("s")) == 1


def test_a_worker_that_was_buried_and_comes_back_before_anyone_took_its_claim_keeps_it(
    crews: Callable[..., Crew], store: Store
) -> None:
    stopped, other = crews(), crews()
    claim = stopped.claim_probe(CANDIDATE.key, seen=0, left=9)
    _kill(stopped)
    other.look()
    stopped.end_search()  # it beats
    assert other.look().orphans == ()
    assert isinstance(claim, Claim)
    assert store.add_row(_row(), claim).trial == 1


def test_a_row_is_kept_once_however_often_it_is_put_in(crews: Callable[..., Crew], store: Store) -> None:
    claim = crews().claim_probe(CANDIDATE.key, seen=0, left=9)
    assert isinstance(claim, Claim)
    row = _row()
    assert store.add_row(row, claim) == store.add_row(row, claim) == store.add_row(row)


def test_finals_wait_for_those_who_search_and_are_held_by_one(crews: Callable[..., Crew]) -> None:
    one, two = crews(), crews()
    one.end_search()
    assert one.claim_finals() is None
    two.end_search()
    claim = one.claim_finals()
    assert claim is not None
    assert two.claim_finals() is None
    assert crews().claim_probe("a", seen=0, left=9) is Refused.FULL  # the machine is to be quiet
    one.release(claim)


def test_the_finals_of_a_worker_that_dies_are_taken_over_but_not_for_ever(crews: Callable[..., Crew]) -> None:
    last = crews()
    last.end_search()
    for _ in range(3):
        dying = crews()
        dying.end_search()
        assert dying.claim_finals() is not None
        assert last.claim_finals() is None
        _kill(dying)
        last.look()
    with pytest.raises(InfraError, match="3 workers died while they confirmed"):
        last.claim_finals()


# -- heartbeats -----------------------------------------------------------------------------------------------------


def test_a_silent_worker_on_another_machine_is_dead_once_everybody_had_time_to_be_heard(
    crews: Callable[..., Crew], enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "FILE_BEAT_S", 0.1)
    one = crews()
    one._beat_s = 0.1  # counts for what is stale; its thread waits for its first beat
    enter(1, 0.0, silent_s=60.0, place="another place")
    assert not one.look().buried  # it has only just come itself
    deadline = time.monotonic() + 20
    while not one.look().buried:
        one._last_beat = time.monotonic()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    enter(1, 0.0, silent_s=60.0, place="another place")
    one._last_beat -= 5  # as after a SIGSTOP, or a time without network
    assert not one.look().buried


def test_a_worker_beats_by_itself(store: Store, url: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "FILE_BEAT_S", 0.05)
    crew = opened(url).crew("s", heartbeat_s=0.05)
    crew.join()

    def heard() -> float:
        with store.reading() as connection:
            return float(connection.execute(workers.select()).mappings().one()["heartbeat"])

    first, deadline = heard(), time.monotonic() + 20
    while heard() == first:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_is_gone_is_dead_at_once_and_a_silent_one_is_not(
    crews: Callable[..., Crew], enter: Enter, neighbour: psutil.Process
) -> None:
    one = crews()
    enter(**living(neighbour), silent_s=1e6)
    view = one.look()
    assert (view.buried, view.neighbours) == ((), 1)
    enter(**gone())
    assert one.look().buried


def test_a_stopped_process_is_given_up_in_postgresql(
    postgres: Server, opened: Open, neighbour: psutil.Process, workload: Workload, machine: Machine
) -> None:
    store = opened(postgres.database())
    crew = store.crew("s", heartbeat_s=0.1)
    crew.join()
    with store.writing() as connection:
        row = Worker("1", "another", **living(neighbour)).row() | {"study": "s", "searching": True, "started": 0.0}
        connection.execute(insert(workers).values(row | {"heartbeat": 0.0}))
    deadline = time.monotonic() + 20
    while not crew.look().buried:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_of_another_boot_or_container_are_not_looked_for_here() -> None:
    assert Worker("1", "f").is_seen()
    assert Worker("1", "f", place="another").is_seen() is None
    assert this_place() == this_place()


def _kill(crew: Crew) -> None:
    """Let a worker look as if its process were gone."""
    with crew._store.writing() as connection:
        connection.execute(update(workers).where(workers.c.id == crew.me.id).values(gone_row()))


def gone_row() -> dict[str, Any]:
    known = gone()
    return {"pid": known["pid"], "process_started": known["started"]}


def _row() -> dict[str, Any]:
    from autotune.store.records import probe_row

    return probe_row("s", CANDIDATE, OK)
