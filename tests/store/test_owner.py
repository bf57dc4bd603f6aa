"""One tuner per study: another is refused, a dead one is taken over."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from sqlalchemy import update

from autotune.errors import SettingsError, StoreError
from autotune.machine.machine import Machine
from autotune.store.engine import open_engine, parse_url, writing
from autotune.store.owner import Owner
from autotune.store.store import Store
from autotune.store.tables import studies
from autotune.workload.workload import Workload

Open = Callable[..., Store]


@pytest.fixture
def store(url: str, opened: Open, workload: Workload, machine: Machine) -> Store:
    store = opened(url)
    store.open_study("s", workload, machine)
    return store


@pytest.fixture
def owned_by(url: str) -> Callable[[Owner], None]:
    def write(owner: Owner) -> None:
        engine = open_engine(parse_url(url))
        with writing(engine) as connection:
            connection.execute(update(studies).values(owner.row()))
        engine.dispose()

    return write


@pytest.fixture
def neighbour() -> Iterator[psutil.Process]:
    """Another live process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield psutil.Process(child.pid)
    child.kill()
    child.wait()


def owner(process: psutil.Process, **more: Any) -> Owner:
    values = {"pid": process.pid, "started": process.create_time(), "host": socket.gethostname(), "until": 0.0}
    return Owner(**(values | more))


def test_a_second_tuner_is_refused_with_the_first_ones_pid_and_host(
    store: Store, owned_by: Callable[[Owner], None], neighbour: psutil.Process
) -> None:
    owned_by(owner(neighbour))
    with pytest.raises(StoreError) as caught:
        store.claim_owner("s")
    assert caught.value.message == (f"study s is being tuned by process {neighbour.pid} on {socket.gethostname()}")
    assert caught.value.exit_code == 5


def test_an_empty_study_that_another_process_tunes_keeps_its_workload(
    store: Store, owned_by: Callable[[Owner], None], neighbour: psutil.Process, workload: Workload, machine: Machine
) -> None:
    owned_by(owner(neighbour))
    with pytest.raises(SettingsError, match="holds another workload"):
        store.open_study("s", dataclasses.replace(workload, seq_len=256), machine)


def test_the_owner_may_claim_again_and_a_release_frees_the_study(store: Store, url: str, opened: Open) -> None:
    store.claim_owner("s")
    store.claim_owner("s")
    store.release_owner("s")
    opened(url).claim_owner("s")


def test_a_process_that_is_gone_is_taken_over(store: Store, owned_by: Callable[[Owner], None]) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    owned_by(Owner(child.pid, time.time(), socket.gethostname(), until=time.time() + 1e6))
    store.claim_owner("s")


def test_a_later_process_with_the_same_pid_is_not_the_owner(
    store: Store, owned_by: Callable[[Owner], None], neighbour: psutil.Process
) -> None:
    owned_by(owner(neighbour, started=neighbour.create_time() - 3600, until=time.time() + 1e6))
    store.claim_owner("s")


def test_a_zombie_owns_nothing(store: Store, owned_by: Callable[[Owner], None]) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    owned_by(owner(psutil.Process(child.pid)))
    store.claim_owner("s")
    child.wait()


def test_an_owner_on_another_host_is_believed_until_its_lease_ends(
    store: Store, owned_by: Callable[[Owner], None]
) -> None:
    elsewhere = Owner(os.getpid(), psutil.Process().create_time(), "far away", until=time.time() + 300)
    owned_by(elsewhere)
    with pytest.raises(StoreError, match="on far away") as caught:
        store.claim_owner("s")
    assert "free in 5 min" in caught.value.hint
    owned_by(Owner(elsewhere.pid, elsewhere.started, elsewhere.host, until=time.time() - 1))
    store.claim_owner("s")


def test_an_owner_that_was_taken_over_cannot_claim_or_release_any_more(
    store: Store, owned_by: Callable[[Owner], None], neighbour: psutil.Process
) -> None:
    store.claim_owner("s")
    owned_by(owner(neighbour))
    store.release_owner("s")
    with pytest.raises(StoreError, match="is being tuned"):
        store.claim_owner("s")
