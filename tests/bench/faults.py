"""Every fault in every phase, on real ranks: right outcome, time to recover, processes left, trials lost.

`make bench-faults`. Every row is a probe of its own, stored as a sweep stores it; a plain probe ends each group, and
must be none the worse. Takes about five minutes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from autotune.probe.measurement import Measurement, Outcome
from autotune.probe.prober import ProbeRequest
from autotune.probe.torchrun import watch
from autotune.probe.torchrun.launcher import Launcher
from autotune.probe.torchrun.prober import TorchrunProber, make_launcher
from autotune.settings import Settings, compose_settings
from autotune.store.store import Store
from tests.probe.torchrun import faulty
from tests.probe.torchrun.conftest import PLAIN, QUICK, strangers
from tests.probe.torchrun.matrix import MATRIX, Row
from tests.probe.torchrun.test_faults import SMALL
from tests.probe.torchrun.trouble import (
    Happening,
    confined,
    delete_run_directory,
    kill_agent,
    kill_fork_server,
    kill_host,
    may_mount,
    once_marked,
    stop_fork_server,
)

DEADLINE_S = {"warm": 8, "cold": 60}
"""Of a probe: cold ranks import for 15 s first, longer beside other work."""
SLACK_S = 10
STUDY = "faults"


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one fault.

    Attributes:
        recovered_s: from the fault to the end of its probe, when the next can begin; None where nothing is marked.
        left: processes of the probe that were still there then.
    """

    about: str
    at: str
    expected: Outcome
    measured: Measurement
    right: bool
    recovered_s: float | None
    left: int


class Bench:
    """Probes faults with one launcher and stores what comes of them."""

    def __init__(self, folder: Path, launcher: str) -> None:
        self._folder = folder
        self.runs = folder / "runs"
        self.runs.mkdir(exist_ok=True)
        tempfile.tempdir = str(self.runs)
        self._overrides = [f"launcher={launcher}", *QUICK]
        self._deadline_s = DEADLINE_S[launcher]
        self._launcher: Launcher = make_launcher(compose_settings(self._overrides))
        self._store = Store.open(f"sqlite:///{folder / 'autotune.db'}")
        plain = compose_settings(self._overrides)
        self._store.open_study(STUDY, plain.workload, plain.machine)
        self._before = len(self._store.probes(STUDY))
        self.made = 0

    def fault(self, row: Row, happens: Happening | None = None, before: Happening = lambda runs: None) -> Found:
        """Probe a model that fails, or hangs until something happens; something may have happened before."""
        mark = self._folder / "mark"
        mark.unlink(missing_ok=True)
        settings = self._settings(row.kind, row.at, mark)
        with once_marked(mark, happens, self.runs) if happens else nullcontext():
            measured = self._probe(settings, before)
        ended = time.monotonic()
        right = (measured.outcome, measured.phase) == (row.outcome, row.phase) and row.message in str(measured.message)
        in_time = measured.wall_s < self._deadline_s + SLACK_S
        recovered = ended - float(mark.read_text()) if mark.exists() else None
        found = Found(row.about, row.at, row.outcome, measured, right and in_time, recovered, len(strangers()))
        _print(found)
        return found

    def plain(self, about: str) -> Found:
        """Probe what nothing is wrong with."""
        measured = self._probe(compose_settings(self._overrides))
        right = measured.outcome is Outcome.OK
        found = Found(f"(nothing, after {about})", "", Outcome.OK, measured, right, None, len(strangers()))
        _print(found)
        return found

    def lost(self) -> int:
        """Trials that the store does not have."""
        return self.made - (len(self._store.probes(STUDY)) - self._before)

    def close(self) -> None:
        """End what is kept."""
        self._launcher.close()
        self._store.close()

    def _probe(self, settings: Settings, before: Happening = lambda runs: None) -> Measurement:
        prober = TorchrunProber(settings, self._launcher)
        prober.describe()
        before(self.runs)
        measured = prober.probe(ProbeRequest(PLAIN, 1))
        self.made += 1
        self._store.add_probe(STUDY, PLAIN, measured)
        return measured

    def _settings(self, kind: str, at: str, mark: Path) -> Settings:
        arguments = f"+model.args={{fault:{kind},at:{at},mark:{mark}}}"
        model = ["model=custom", "model.factory=faulty:build", arguments, f"probe.deadline_s={self._deadline_s}"]
        return compose_settings([*model, self._overrides[0], *QUICK])


HANGS = "hang"
OURS: list[tuple[str, str, Happening, str]] = [
    ("warm", "the launcher's host killed", kill_host, "the launcher's host process died"),
    ("warm", "the fork server killed", kill_fork_server, "the fork server died"),
    ("warm", "the run directory deleted", delete_run_directory, "the run directory was deleted"),
    ("cold", "torchrun killed", kill_agent, "torchrun ended without a report"),
    ("cold", "the run directory deleted", delete_run_directory, "the run directory was deleted"),
]


def main() -> None:
    """Inject every fault, print the table, and end with exit code 1 where one did not come out right."""
    os.chdir(Path(faulty.__file__).parent)  # its factory is imported from there
    folder = Path(tempfile.mkdtemp(prefix="autotune-faults-"))
    found: list[Found] = []
    lost = 0
    print(f"{'fault':44}{'in':10}{'outcome':12}{'wall':>8}{'recover':>9}{'left':>6}")
    try:
        for launcher in ("warm", "cold"):
            bench = Bench(folder, launcher)
            for row in MATRIX if launcher == "warm" else [row for row in MATRIX if row.kind in ("kill", "vanish")]:
                found.append(bench.fault(row))
            found.append(bench.plain("those"))
            for _, about, happens, message in (ours for ours in OURS if ours[0] == launcher):
                row = Row(HANGS, MATRIX[0].at, about, Outcome.INFRA, None, message)
                found += [bench.fault(row, happens), bench.plain(about)]
            if launcher == "warm":
                found += _stopped(bench)
            lost += bench.lost()
            bench.close()
        found += [_full(folder, *place) for place in FULL if may_mount()]
    finally:
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)
    _conclude(found, lost)


def _stopped(bench: Bench) -> list[Found]:
    """A fork server that forks no more."""
    begin, watch.BEGIN_S = watch.BEGIN_S, 3.0
    row = Row("none", MATRIX[0].at, "the fork server stopped", Outcome.INFRA, None, "no rank had begun")
    stopped = bench.fault(row, before=stop_fork_server)
    watch.BEGIN_S = begin
    return [stopped, bench.plain(row.about)]


FULL = [("/dev/shm", "16m", "/dev/shm has 16 MiB left"), ("small", "16k", "(TMPDIR) is full")]


def _full(folder: Path, place: str, size: str, words: str) -> Found:
    """A whole sweep on a machine where a place is full: it must end with code 4 and say which."""
    (folder / "small").mkdir(exist_ok=True)
    began = time.monotonic()
    run = confined(folder, [(place, size)], *SMALL, TMPDIR=str(folder / "small")).finish()
    right = run.code == 4 and words in run.err and not run.left
    message = "" if right else f"exit code {run.code}: {run.err[-300:]}"
    measured = Measurement(Outcome.INFRA, "torchrun", message=message, wall_s=time.monotonic() - began)
    found = Found(f"{place} full ({size}), a whole sweep", "", Outcome.INFRA, measured, right, None, len(run.left))
    _print(found)
    return found


def _print(found: Found) -> None:
    recovered = f"{found.recovered_s:.2f} s" if found.recovered_s is not None else ""
    measured = found.measured
    print(
        f"{found.about:44}{found.at:10}{measured.outcome:12}{measured.wall_s:6.2f} s{recovered:>9}{found.left:6}"
        + ("" if found.right else f"   WRONG: {found.expected} expected; {measured.phase}, {measured.message}"),
        flush=True,
    )


def _conclude(found: list[Found], lost: int) -> None:
    faults = [f for f in found if not f.about.startswith("(")]
    after = [f for f in found if f.about.startswith("(")]
    times = [f.recovered_s for f in faults if f.recovered_s is not None and f.expected is not Outcome.OK]
    waits = sum(f.expected is Outcome.TIMEOUT for f in faults)
    print(
        f"\n{len(faults)} faults injected, {sum(f.right for f in faults)} with the right outcome; "
        f"{sum(f.right for f in after)} of {len(after)} probes after them ok\n"
        f"time to recover: median {statistics.median(times):.2f} s, longest {max(times):.2f} s "
        f"(a hang waits for its deadline of {DEADLINE_S['warm']} s: {waits} of them)\n"
        f"processes left: {sum(f.left for f in found)}, trials lost: {lost}"
    )
    if not all(f.right for f in found) or lost or any(f.left for f in found):
        sys.exit(1)
