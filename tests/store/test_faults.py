"""Whatever a database does to us is one sentence and a hint, without a password, and loses nothing stored."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import event

from autotune.candidate import Candidate
from autotune.errors import StoreError
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.store import engine as engine_module
from autotune.store.store import Store
from autotune.workload.workload import Workload

Open = Callable[..., Store]
CANDIDATE = Candidate(micro_batch=1, accumulation=16, zero_stage=1, precision="bf16")
BULKY = Measurement(Outcome.CRASHED, "table", message="x" * 20_000)


def fails(url: str, **more: bool) -> StoreError:
    with pytest.raises(StoreError) as caught:
        Store.open(url, **more)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("studies/autotune.db", "URL cannot be read"),
        ("postgresql://u:secret@host:port/db", "URL cannot be read"),
        ("mysql://u:secret@host/db", "a store in mysql is not supported"),
        ("postgresql+nonsense://u:secret@host/db", r"no driver is known for a store in postgresql\+nonsense"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_a_url_that_names_nothing_usable(url: str, message: str) -> None:
    error = fails(url)
    assert re.search(message, error.message)
    assert "secret" not in error.message + error.hint


def test_a_server_that_does_not_answer_and_no_password_in_the_message() -> None:
    error = fails("postgresql://tuner:s3cret@127.0.0.1:1/studies")
    assert "Connection refused" in error.message
    assert "postgresql+psycopg://tuner:***@127.0.0.1:1/studies" in error.message
    assert "s3cret" not in error.message + error.hint


def test_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    error = fails("postgresql://tuner:s3cret@127.0.0.1:1/studies")
    assert "driver is not installed" in error.message
    assert "autotune[postgres]" in error.hint


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, and long enough to have a header " * 20)
    assert "is not a SQLite database" in fails(f"sqlite:///{path}").message
    assert path.read_text().startswith("not a database")


def test_a_database_that_is_damaged(tmp_path: Path, opened: Open, workload: Workload, machine: Machine) -> None:
    path = tmp_path / "a.db"
    store = opened(f"sqlite:///{path}")
    store.open_study("s", workload, machine)
    for _ in range(10):
        store.add_probe("s", CANDIDATE, BULKY)
    store.close()
    whole = bytearray(path.read_bytes())
    whole[4096:] = os.urandom(len(whole) - 4096)
    path.write_bytes(whole)
    assert "is damaged" in fails(f"sqlite:///{path}").message


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be made" in fails(f"sqlite:///{tmp_path}/file/below/a.db").message


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    assert "cannot be opened" in fails(f"sqlite:///{tmp_path}").message


def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    assert "there is no store" in fails(f"sqlite:///{tmp_path}/typo.db", create=False).message
    assert not (tmp_path / "typo.db").exists()


def test_a_locked_database(
    file_url: str, opened: Open, workload: Workload, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LOCK_TIMEOUT_S", 0.1)
    store = opened(file_url)
    store.open_study("s", workload, machine)
    other = sqlite3.connect(file_url.removeprefix("sqlite:///"))
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="is locked by another program"):
        store.add_probe("s", CANDIDATE, BULKY)
    other.rollback()
    other.close()
    assert store.add_probe("s", CANDIDATE, BULKY).trial == 1


def test_a_full_disk_loses_nothing_that_is_stored(
    file_url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    store = opened(file_url)
    store.open_study("s", workload, machine)
    kept = [store.add_probe("s", CANDIDATE, BULKY) for _ in range(3)]
    pages = sqlite3.connect(file_url.removeprefix("sqlite:///")).execute("PRAGMA page_count").fetchone()[0]
    store.close()

    def limit(connection: sqlite3.Connection, record: object) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(store._engine, "connect", limit)
    with pytest.raises(StoreError, match=r"the disk that holds .* is full") as caught:
        store.add_probe("s", CANDIDATE, BULKY)
    assert "everything stored so far is kept" in caught.value.hint
    assert opened(file_url).probes("s") == kept


IN_A_TINY_TMPFS = """
set -e
mount -t tmpfs -o size=300k tmpfs "$1"
"$2" - "$1" <<'PYTHON'
import subprocess, sys
from autotune.candidate import Candidate
from autotune.errors import StoreError
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.store.store import Store
from autotune.workload.workload import Model, Workload

folder = sys.argv[1]
url = f"sqlite:///{folder}/autotune.db"
store = Store.open(url)
store.open_study("s", Workload(Model("m")), Machine("cpu", device_memory_gib=1.0))
candidate, bulky = Candidate(1, 1, 1, "bf16"), Measurement(Outcome.CRASHED, "table", message="x" * 20_000)
kept = []
try:
    while True:
        kept.append(store.add_probe("s", candidate, bulky))
except StoreError as error:
    print(error.message)
store.close()
store = Store.open(url)
assert kept and store.probes("s") == kept
store.close()
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
try:
    Store.open(url).add_probe("s", candidate, bulky)
except StoreError as error:
    print(error.message)
try:
    Store.open(f"sqlite:///{folder}/other.db")
except StoreError as error:
    print(error.message)
assert Store.open(url, create=False).probes("s") == kept
PYTHON
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tiny file system of its own")
def test_a_real_full_and_then_read_only_file_system(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", IN_A_TINY_TMPFS, "bash", str(tmp_path), sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare: " in done.stderr or "mount: " in done.stderr:
        pytest.skip("no private mounts here: " + done.stderr.strip())
    assert done.returncode == 0, done.stderr
    full, read_only, new = done.stdout.splitlines()
    assert full == f"the disk that holds sqlite:///{tmp_path}/autotune.db is full"
    assert "cannot be written: the file or its folder is read-only" in read_only
    assert "cannot be opened" in new


def test_a_killed_writer_loses_nothing_that_was_committed(
    file_url: str, opened: Open, workload: Workload, machine: Machine
) -> None:
    opened(file_url).open_study("s", workload, machine)
    code = textwrap.dedent(
        """
        import os, sys
        from autotune.candidate import Candidate
        from autotune.probe.measurement import Measurement, Outcome
        from autotune.store.engine import writing
        from autotune.store.store import Store
        from autotune.store.tables import studies

        store = Store.open(sys.argv[1])
        store.add_probe("s", Candidate(1, 1, 1, "bf16"), Measurement(Outcome.OK, "table"))
        with writing(store._engine) as connection:
            connection.execute(studies.update().values(winner_trial=7))
            os.kill(os.getpid(), 9)
        """
    )
    assert subprocess.run([sys.executable, "-c", code, file_url], check=False).returncode == -9
    store = opened(file_url)
    assert [record.trial for record in store.probes("s")] == [1]
    assert store.study("s").winner_trial is None
