"""The run directory of one probe: made for it, gone after it, whatever became of who made it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.process import Identity, this_place

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "autotune-probe-"
_ROOM = 2**20
"""A place with less than that left counts as full, bytes: a result file takes some ten thousand."""


@contextmanager
def run_directory() -> Iterator[Path]:
    """A new empty directory, removed at the end.

    Raises:
        OSError: none can be made.
    """
    here = Identity.here()
    directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_place()}-{here.pid}-{here.started}-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_stale() -> None:
    """Remove the run directories that killed processes left behind, those whose processes could be seen from here."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}{_place()}-*-*-*"):
        _, pid, started, *_ = directory.name.removeprefix(_PREFIX).split("-")
        if pid.isdecimal() and started.isdecimal() and not Identity(int(pid), int(started)).alive():
            shutil.rmtree(directory, ignore_errors=True)  # another user's it cannot, another tuner may be quicker


def _place() -> str:
    """Eight digits that are equal for processes that see each other: containers may share a temporary folder."""
    return hashlib.sha256(this_place().encode()).hexdigest()[:8]


def full_place() -> str | None:
    """A place that ranks write to and that has no room left; None where all have some."""
    temporary = Path(tempfile.gettempdir())
    places = {str(SHARED_MEMORY): SHARED_MEMORY, f"the disk of {temporary} (TMPDIR)": temporary}
    for name, place in places.items():
        found = os.statvfs(place)
        if found.f_bavail * found.f_frsize < _ROOM:
            return name
    return None
