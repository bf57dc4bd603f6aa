"""Real sweeps by several workers: two commands on one PostgreSQL study, one command that runs two probes at a time."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from autotune.store.store import Store
from tests.commands import Run, autotune
from tests.postgres import PASSWORD, Server
from tests.test_credentials import listing
from tests.test_tune import MODEL, PLAIN, QUICK, trials

pytestmark = pytest.mark.probes

SWEEP = (*MODEL, *QUICK, *PLAIN, "machine.devices_per_node=1", "space.micro_batch=[1,2]", "space.zero_stage=[1,2]")
"""Four candidates on one emulated device, so that two probes at a time have a processor each."""
STUDY = "gpt_tiny-cpu-1x1"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("one", "two")]
    for folder in made:
        folder.mkdir()
    return made


def ranks(run: Run) -> int:
    return sum(map(_is_rank, run.living()))


def _is_rank(process: psutil.Process) -> bool:
    try:
        parent = process.parent()
        return parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())
    except psutil.Error:
        return False


def test_two_workers_sweep_one_study_though_one_is_killed_in_a_probe_and_the_server_restarts(
    postgres: Server, folders: list[Path], tmp_path: Path
) -> None:
    url = postgres.database()
    first, second = (autotune(folder, *SWEEP, f"study.store={url}", TMPDIR=str(folder)) for folder in folders)
    listed: list[str] = []
    with listing(listed, (PASSWORD + "@",)):
        time.sleep(1.0)  # in which they start anew
        listed.clear()
        first.until(" probe ")
        second.until(" probe ")
        deadline = time.monotonic() + 60
        while not ranks(first):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        first.process.kill()
        first.finish()
        postgres.restart()
        second.finish()
    assert first.left == []
    assert second.code == 0, second.err
    assert second.left == []
    assert listed == []
    store = Store.open(url)
    rows = store.probes(STUDY)
    winner = store.study(STUDY).winner_trial
    store.close()
    searched = Counter(row.key for row in rows if not row.confirmation)
    assert len(searched) == 4
    assert set(searched.values()) == {1}
    recipe = json.loads((folders[1] / "studies" / STUDY / "recipe.json").read_text())
    assert recipe["trial"] == winner
    told = first.out + first.err + second.out + second.err
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in [told, *written] if PASSWORD + "@" in text]


def test_one_command_runs_two_probes_at_a_time_on_processors_of_their_own(tmp_path: Path) -> None:
    run = autotune(tmp_path, *SWEEP, "probe.parallel=2").finish()
    assert run.code == 0, run.err
    assert run.left == []
    assert "disturb each other" in run.err
    assert re.search(r"trial \d+ by \S+: ", run.err)
    rows = trials(tmp_path, STUDY)
    assert set(Counter(row["key"] for row in rows if not row["confirmation"]).values()) == {1}
    store = Store.open(f"sqlite:///{tmp_path / 'studies' / 'autotune.db'}", create=False)
    searched = [row for row in store.probes(STUDY) if not row.confirmation]
    confirmed = [row for row in store.probes(STUDY) if row.confirmation]
    store.close()
    assert len({row.worker for row in searched}) == 2
    assert {row.measurement.environment.get("neighbours") for row in searched} == {1}
    assert {row.measurement.environment.get("neighbours") for row in confirmed} == {None}
    assert sorted(path.name for path in (tmp_path / "studies").iterdir()) == ["autotune.db", STUDY]


def test_an_interrupted_command_takes_its_other_workers_with_it(tmp_path: Path) -> None:
    run = autotune(tmp_path, *SWEEP, "probe.parallel=2")
    run.until(" probe 1")
    deadline = time.monotonic() + 60
    while not any("autotune.sibling" in process.cmdline() for process in run.living()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.process.send_signal(signal.SIGINT)
    run.finish()
    assert run.code == 130
    assert run.left == []
