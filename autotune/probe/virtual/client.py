"""The controller's end of the tracing process: started at the first job, ended with the prober."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from autotune import credentials
from autotune.errors import InfraError
from autotune.machine.machine import Machine
from autotune.probe.torchrun.launcher import Tell, leashed
from autotune.probe.torchrun.starting import last_line, log_file
from autotune.probe.virtual.job import Job
from autotune.process import kill_tree


class Tracer:
    """Traces jobs on all processors.

    Args:
        machine: decides which accelerator DeepSpeed believes in.
        tell: takes a sentence when something takes its time.
    """

    def __init__(self, machine: Machine, tell: Tell) -> None:
        self._accelerator, self._tell = machine.accelerator, tell
        self._process: subprocess.Popen[str] | None = None
        self._numbered = 0

    def run(self, jobs: Sequence[Job], on_done: Callable[[int], None] = lambda index: None) -> None:
        """Trace jobs; afterwards each run has its tape or its error file.

        Args:
            jobs: what to trace.
            on_done: called with the index of each job that is done, as it is done.

        Raises:
            InfraError: the process does not start, or dies.
        """
        self._request([job.to_json() for job in jobs], on_done)

    def describe(self, folder: Path) -> None:
        """Run autotune.probe.torchrun.describe on a folder.

        Raises:
            InfraError: the process does not start, or dies.
        """
        self._request([json.dumps({"describe": str(folder)})], lambda index: None)

    def predict(self, requests: Sequence[str]) -> None:
        """Answer requests of Predictor.to_json, on all processors.

        Raises:
            InfraError: the process does not start, or dies.
        """
        self._request(requests, lambda index: None)

    def close(self) -> None:
        """End the process and all that it forked."""
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            process.wait()
            for end in (process.stdin, process.stdout, self._log):
                assert end is not None
                with contextlib.suppress(BrokenPipeError):  # a request that it did not live to read
                    end.close()

    def _request(self, lines: Sequence[str], on_done: Callable[[int], None]) -> None:
        if not lines:
            return
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        first = self._numbered
        self._numbered += len(lines)
        with ExitStack() as unless_done:
            unless_done.callback(self.close)  # interrupted in the middle, what it still traces is nobody's
            try:
                for line in lines:
                    process.stdin.write(line + "\n")
                process.stdin.flush()
                for _ in lines:
                    reply = process.stdout.readline()
                    if not reply:
                        raise BrokenPipeError
                    on_done(json.loads(reply)["done"] - first)
            except BrokenPipeError:
                raise InfraError(
                    f"the process that traces died: {last_line(self._log)}", "the same command goes on"
                ) from None
            unless_done.pop_all()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()  # what is left of one that died between two requests
        self._tell("importing torch and DeepSpeed to trace on virtual devices")
        self._numbered = 0
        self._log = log_file()
        environ = credentials.without(os.environ) | {
            "DS_ACCELERATOR": self._accelerator,
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",  # what is traced does not depend on the devices here, and touches none
        }
        # Its own session: Ctrl-C in the terminal is the controller's to handle.
        self._process = subprocess.Popen(
            leashed([sys.executable, "-m", "autotune.probe.virtual.tracer"]),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with ExitStack() as unless_ready:
            unless_ready.callback(self.close)  # interrupted here, its first reply would be taken for that of a job
            if not self._process.stdout.readline():
                raise InfraError(
                    f"the process that traces did not start: {last_line(self._log)}",
                    "run `python -m autotune.probe.virtual.tracer < /dev/null` to see more",
                )
            unless_ready.pop_all()
        return self._process
