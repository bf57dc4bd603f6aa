"""optuna-dashboard opens a study as it is: our trials with their knobs, states and values."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.settings import Settings, normalise_store
from autotune.store.store import Store
from tests.postgres import Server

Get = Callable[[str], Any]


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, url: str) -> str:
    if request.param == "sqlite":
        return url
    server: Server = request.getfixturevalue("postgres")
    return server.database()


@pytest.fixture
def dashboard() -> Iterator[Callable[[str], Get]]:
    """Starts the dashboard's own command on a free port, and asks it."""
    servers: list[subprocess.Popen[bytes]] = []

    def begin(url: str) -> Get:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = Path(sys.executable).with_name("optuna-dashboard")
        words = [str(command), url, "--host", "127.0.0.1", "--port", str(port), "--server", "wsgiref"]
        servers.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

        def get(path: str) -> Any:
            deadline = time.monotonic() + 60
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                        return json.load(answer)
                except urllib.error.URLError:
                    assert servers[-1].poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

        return get

    yield begin
    for server in servers:
        server.terminate()
        server.wait(30)


def test_a_finished_study_opens_unchanged(
    place: str, sweeper: Any, settings: Callable[..., Settings], dashboard: Callable[[str], Get]
) -> None:
    store = Store.open(place)
    sweeper.store = store
    sweeper.run(settings())
    expected = sweeper.search._trials.study.get_trials()
    store.close()
    get = dashboard(normalise_store(place))
    [study] = get("/api/studies")["study_summaries"]
    assert study["study_name"].startswith("formula-table-1x8/")
    detail = get(f"/api/studies/{study['study_id']}")
    assert [trial["number"] for trial in detail["trials"]] == [trial.number for trial in expected]
    for shown, trial in zip(detail["trials"], expected, strict=True):
        assert shown["state"] == trial.state.name.capitalize()
        assert shown.get("values") == trial.values
        assert {p["name"]: p["param_external_value"] for p in shown["params"]} == {
            name: str(value) for name, value in trial.params.items()
        }
    store = Store.open(place)
    after = optuna.load_study(study_name=study["study_name"], storage=store.optuna_storage()).get_trials()
    store.close()
    assert after == expected  # constraints too, which the dashboard does not show: it looks for those of Optuna 4
