"""The warm launcher: one long-lived host process, whose fork server starts ranks in tens of milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.errors import InfraError
from autotune.probe.torchrun import preload
from autotune.probe.torchrun.launcher import AgentReport, Tell, leashed
from autotune.probe.torchrun.starting import compile_operations, last_line, log_file, wait_telling
from autotune.probe.torchrun.watch import Watch
from autotune.process import kill_session

DESCRIBE_S = 300.0
"""Building the model without its weights may take so long, seconds; a user's factory may do more than that."""
CLOSE_S = 1.0
"""The host has so long to leave by itself, seconds."""


class Warm:
    """One long-lived host process (host.py), whose fork server starts ranks in tens of milliseconds.

    Args:
        environ: of every rank.
        tell: takes a sentence when something takes its time.
        prepared: whether DeepSpeed's operations are known to be compiled here.
    """

    name = "warm"

    def __init__(self, environ: dict[str, str], tell: Tell, prepared: bool = False) -> None:
        self._environ, self._tell, self._prepared = environ, tell, prepared
        self._host: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._buffer = b""

    @property
    def pid(self) -> int | None:
        """The host process; None where none is running."""
        return self._host.pid if self._host is not None else None

    def describe(self, directory: Path) -> None:
        """See Launcher."""
        self._request({"describe": str(directory)})
        if self._reply(DESCRIBE_S) is None:
            self.close()  # nothing that is stuck is asked for probes

    def run(self, spec_path: Path, world: int, deadline_s: float) -> AgentReport:
        """See Launcher."""
        self._request({"spec": str(spec_path)})
        watch = Watch(spec_path.parent, world, deadline_s)
        report: AgentReport | None = None
        try:
            while True:
                report = self._reply(0.1)
                if report is not None:
                    report = watch.report(report)
                    return report
                if not self._alive():
                    self._tell("the fork server's host died; a new one is started")
                    return watch.report({"exit_codes": {}, "error": "the launcher's host process died"})
                if watch.overdue():
                    self.close()
                    return watch.report({"exit_codes": {}, "error": None})
        finally:
            watch.kill()
            if report is None or report["error"] or not watch.begun:
                self.close()  # interrupted, dead, stuck or spoilt: a new host serves the next probe

    def close(self) -> None:
        """See Launcher."""
        host, self._host = self._host, None
        if host is None:
            return
        os.close(self._requests)
        os.close(self._replies)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(CLOSE_S)  # at the end of its requests it leaves by itself
        kill_session(host.pid)
        host.wait()

    def _alive(self) -> bool:
        return self._host is not None and self._host.poll() is None

    def start(self) -> None:
        """Start the host process, and with it the fork server.

        Raises:
            InfraError: it does not start.
        """
        if self._environ["DS_ACCELERATOR"] != "cpu" and not self._prepared:
            compile_operations(self._environ, self._tell)
        self._prepared = True
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._buffer = b""
        with tempfile.NamedTemporaryFile("w", prefix="autotune-status-") as status, log_file() as log:
            environ = self._environ | {preload.STATUS_FILE: status.name}
            command = [sys.executable, "-m", "autotune.probe.torchrun.host", str(requests), str(replies)]
            # Its own session: Ctrl-C in the terminal is the controller's to handle.
            self._host = subprocess.Popen(
                leashed(command),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(requests, replies),
                start_new_session=True,
            )
            os.close(requests)
            os.close(replies)
            answer = wait_telling(lambda: self._reply(0.2), self._alive, Path(status.name), self._tell)
            if not (answer and answer.get("ready")):
                self.close()
                raise InfraError(
                    f"the process that ranks are forked from did not start: {last_line(log)}",
                    "try launcher=cold, whose ranks start by themselves, to see more",
                )

    def _request(self, request: dict[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        if self._alive():
            with contextlib.suppress(BrokenPipeError):  # it has died just now
                os.write(self._requests, line)
                return
        self.close()
        self.start()
        os.write(self._requests, line)

    def _reply(self, timeout_s: float) -> AgentReport | None:
        """The next line from the host, or None after the timeout or at its end."""
        if b"\n" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], timeout_s)
            if ready:
                self._buffer += os.read(self._replies, 65536)
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        report: AgentReport = json.loads(line)
        return report
