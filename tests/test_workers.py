"""Real sweeps by several workers: two commands on one PostgreSQL study, one command that runs two probes at a time."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from autotune.store.store import Store
from tests.commands import Run, autotune
from tests.postgres import PASSWORD, Server
from tests.test_credentials import listing
from tests.test_tune import MODEL, PLAIN, QUICK

pytestmark = pytest.mark.probes

SWEEP = (*MODEL, *QUICK, *PLAIN, "machine.devices_per_node=1", "space.micro_batch=[1,2,8]", "space.zero_stage=[1,2]")
"""Six candidates on one emulated device, so that two probes at a time have a processor each."""
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
    first, second = (
        autotune(folder, *SWEEP, f"study.store={url}", "study.heartbeat_s=1", TMPDIR=str(folder)) for folder in folders
    )
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
    assert len(searched) == 6
    assert set(searched.values()) == {1}
    recipe = json.loads((folders[1] / "studies" / STUDY / "recipe.json").read_text())
    assert recipe["trial"] == winner
    told = first.out + first.err + second.out + second.err
    written = [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in [told, *written] if PASSWORD + "@" in text]
