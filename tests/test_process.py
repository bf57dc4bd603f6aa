"""A process is known by its number and its start, whatever the clock says, and ends with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from autotune.process import Identity, kill_session, kill_tree

PARENT = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, start_new_session={own})
print(child.pid, flush=True)
time.sleep({lives})
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def parent(*, lives: float, own: bool = False) -> tuple[subprocess.Popen[str], int]:
    """A process in a session of its own, and the child that it has started."""
    code = PARENT.format(own=own, lives=lives)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while (found := Identity.of(pid)) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found is None


def test_a_process_is_itself_until_it_ends(sleeper: subprocess.Popen[bytes]) -> None:
    identity = Identity.of(sleeper.pid)
    assert identity is not None
    assert identity.alive()
    assert not Identity(identity.pid, identity.started - 1).alive()  # an earlier one with the same number
    sleeper.kill()
    assert gone(sleeper.pid)  # a zombie is none
    assert not identity.alive()


def test_the_time_of_day_has_no_part_in_it(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    before = Identity.of(sleeper.pid)
    monkeypatch.setattr(psutil, "boot_time", lambda: 0.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert Identity.of(sleeper.pid) == before


def test_a_stopped_process_is_told_from_one_that_runs(sleeper: subprocess.Popen[bytes]) -> None:
    identity = Identity.of(sleeper.pid)
    assert identity is not None
    assert not identity.stopped()
    os.kill(sleeper.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while not identity.stopped() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert identity.stopped()
    assert identity.alive()


def test_a_tree_ends_with_its_root_though_it_has_a_session_of_its_own() -> None:
    root, child = parent(lives=60, own=True)
    kill_tree(root.pid)
    assert gone(root.pid)
    assert gone(child)
    root.communicate()


def test_orphans_end_with_their_session() -> None:
    leader, orphan = parent(lives=0)
    leader.communicate()  # its child is nobody's now
    assert Identity.of(orphan) is not None
    kill_session(leader.pid)
    assert gone(orphan)
