"""The cold launcher: a torchrun of its own for every probe, slower, and nothing is shared between probes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from autotune.probe.torchrun.launcher import AgentReport, Tell, leashed
from autotune.probe.torchrun.starting import compile_operations, describe_here
from autotune.probe.torchrun.watch import Watch
from autotune.process import kill_session


class Cold:
    """A torchrun of its own for every probe: slower, and nothing is shared between probes."""

    name = "cold"

    def __init__(self, environ: dict[str, str], tell: Tell) -> None:
        self._environ, self._tell = environ, tell
        self._prepared = False

    def describe(self, directory: Path) -> None:
        """See Launcher."""
        describe_here(directory, self._environ)

    def run(self, spec_path: Path, world: int, deadline_s: float) -> AgentReport:
        """See Launcher."""
        if not self._prepared:  # so that no probe is timed while compiling
            compile_operations(self._environ, self._tell)
            self._prepared = True
        watch = Watch(spec_path.parent, world, deadline_s)
        with (spec_path.parent / "agent.log").open("wb") as log:
            agent = subprocess.Popen(
                leashed([sys.executable, "-m", "autotune.probe.torchrun.agent", str(spec_path)]),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while agent.poll() is None and not watch.overdue():
                time.sleep(0.05)
        finally:
            ended_here = watch.ended  # else the agent's end was its own
            kill_session(agent.pid)
            agent.wait()
            watch.kill()
        try:
            report: AgentReport = json.loads((spec_path.parent / "agent.json").read_text())
        except (OSError, ValueError):
            error = None if ended_here else "torchrun ended without a report"
            report = {"exit_codes": {}, "error": error}
        return watch.report(report)

    def close(self) -> None:
        """See Launcher: nothing is kept."""
