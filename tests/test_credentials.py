"""A database's password is seen by nobody: in what is printed, in files, in the process list."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from autotune import credentials
from autotune.store.store import Store
from tests.commands import Run, autotune
from tests.postgres import Server

pytestmark = pytest.mark.probes

SECRET = "c0rrect h0rse/b@ttery"
ENCODED = "c0rrect%20h0rse%2Fb%40ttery"
FORMS = (SECRET, ENCODED, "c0rrect+h0rse", "b@ttery", "b%40ttery")
CPU = ("machine=cpu", "model=gpt_tiny")


@pytest.fixture
def server(postgres: Server) -> Iterator[str]:
    """Where a database is that the marker opens: host, port and name of it."""
    url = postgres.database()
    Store.open(url).close()
    place = url.rpartition("@")[2]
    with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
        connection.execute("CREATE ROLE keeper LOGIN SUPERUSER PASSWORD 'c0rrect h0rse/b@ttery'")
        yield place
        connection.execute(f"DROP DATABASE {place.rpartition('/')[2]} WITH (FORCE)")
        connection.execute("DROP ROLE keeper")


@contextmanager
def listing(found: list[str], forms: Sequence[str] = FORMS) -> Iterator[None]:
    """Looks at every process's arguments again and again, and notes where the marker is."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for entry in Path("/proc").iterdir():
                try:
                    words = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
                except OSError:
                    continue
                if any(form.encode() in words for form in forms):
                    found.append(words.decode(errors="replace"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def seen(run: Run, *folders: Path) -> list[str]:
    """Where the marker is in what a run printed and wrote."""
    texts = {"stdout": run.out, "stderr": run.err}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                texts[str(path)] = path.read_bytes().decode(errors="replace")
    return [name for name, text in texts.items() if any(form in text for form in FORMS)]


def test_a_password_is_seen_nowhere(server: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    given = {
        "debug": ("--debug", "study.store=postgresql://keeper:{}@" + server.replace("studies_", "none_"), *CPU),
        "query": (f'study.store="postgresql://{server}?user=keeper&password={{}}&sslmode=disable"', "model=nope"),
        "shown": ("study.store=postgresql://keeper:{}@" + server, "--cfg", "job", "--resolve"),
        "composed": ("study.store=postgresql://keeper:{}@" + server, "--info"),
        "wrong": ("--debug", "study.store=postgresql://keeper:{}wrong@" + server, *CPU),
        "verb": ("studies", "--store", "postgresql://keeper:{}@" + server),
        "nowhere": ("trials", "x", "--store=postgresql://keeper:{}@127.0.0.1:1/db", "--debug"),
    }
    listed: list[str] = []
    with listing(listed):
        runs = {
            name: autotune(tmp_path, *(word.replace("{}", ENCODED) for word in words), TMPDIR=str(temporary))
            for name, words in given.items()
        }
        time.sleep(2.0)  # in which they start anew
        listed.clear()
        for run in runs.values():
            run.finish()
    assert {name: run.code for name, run in runs.items()} == {
        "debug": 5,
        "query": 2,
        "shown": 0,
        "composed": 0,
        "wrong": 5,
        "verb": 0,
        "nowhere": 5,
    }, {name: run.err for name, run in runs.items()}
    assert listed == []
    assert {name: seen(run, tmp_path) for name, run in runs.items()} == {name: [] for name in runs}
    assert "keeper:***@" in runs["shown"].out
    assert "password authentication failed" in runs["wrong"].err
    assert [run.left for run in runs.values()] == [[]] * len(runs)


def test_a_password_where_it_cannot_be_moved_from_is_refused(tmp_path: Path) -> None:
    run = autotune(tmp_path, "study={store: 'postgresql://u:h0tpotato@h/db'}").finish()
    assert run.code == 2
    assert "AUTOTUNE_STORE" in run.err
    assert "h0tpotato" not in run.err


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u:c0rrect%20h0rse%2Fb%40ttery@h/db",
        "postgresql+psycopg://u:c0rrect%20h0rse%2Fb%40ttery@h:5432/db?sslmode=require",
        "postgresql://h/db?user=u&password=c0rrect%20h0rse%2Fb%40ttery&sslmode=require",
        "postgresql://h/db?sslpassword=c0rrect+h0rse%2Fb%40ttery",
        "postgresql://u:c0rrect h0rse/b@ttery@h:5432/db",  # not encoded, as people write it
        "could not connect: password=c0rrect+h0rse/b@ttery host=h",
        "'c0rrect h0rse/b@ttery' is what libpq was given",
    ],
)
def test_every_form_of_a_password_is_masked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_known", set())
    credentials.remember(f"postgresql://u:{ENCODED}@h/db")
    told = credentials.masked(text)
    assert "***" in told
    assert not any(form in told for form in FORMS)


def test_a_url_without_a_password_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_known", set())
    for text in ("postgresql://u@h:5432/db", "sqlite:///a:b@c.db", "at 12:30:45 me@there", "python -m autotune a=b"):
        credentials.remember(text)
        assert credentials.masked(text) == text
        assert not credentials.passwords(text)


def test_what_ranks_inherit_has_no_store() -> None:
    from autotune.machine.machine import Machine
    from autotune.probe.torchrun.launcher import environment
    from autotune.workload.workload import Workload

    os.environ["AUTOTUNE_STORE"] = "postgresql://u:p@h/db"
    try:
        assert "AUTOTUNE_STORE" not in environment(Machine(accelerator="cpu"), Workload(), 1)
    finally:
        del os.environ["AUTOTUNE_STORE"]
    assert tempfile.gettempdir()
