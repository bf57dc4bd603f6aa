"""The process that traces: `python -m autotune.probe.virtual.tracer`, one job per line on stdin, replies on stdout.

It imports torch and DeepSpeed once, computes nothing, and forks a child for every job, one per processor at a time.
The child builds and initialises the engine and forks again for every run of its job, so that runs share what they
have in common. A run ends as one tape file.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.probe.torchrun.leash import die_with_parent
from autotune.probe.virtual.job import Job, error_path, failure_of, write_error
from autotune.workload.phase import Phase


def main() -> None:
    """Serve jobs until stdin ends."""
    die_with_parent()
    # What models and libraries print goes where errors go: stdout is for replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    running: dict[int, tuple[int, str]] = {}
    waiting: list[tuple[int, str]] = []
    number, buffer, ended = 0, b"", False
    most = len(os.sched_getaffinity(0))
    while running or waiting or not ended:
        idle = not (running or waiting)
        ready, _, _ = select.select([] if ended else [0], [], [], None if idle else 0.02)
        if ready:
            data = os.read(0, 1 << 16)
            ended, buffer = not data, buffer + data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                waiting.append((number, line.decode()))
                number += 1
        while waiting and len(running) < most:
            index, text = waiting.pop(0)
            running[_fork(lambda text=text: _answer(text))] = index, text  # type: ignore[misc]
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            index, text = running.pop(pid)
            if status:
                _bury(text, status)
            print(json.dumps({"done": index}), file=replies, flush=True)


def _import() -> None:
    """Import what every job needs, in the process that is forked."""
    import transformers.models.llama.modeling_llama  # noqa: F401 - and with it what all models import, for half a second

    import autotune.probe.virtual.session  # noqa: F401
    from autotune.probe.torchrun import preload

    preload.prepare(operations=False)
    gc.collect()
    gc.freeze()  # what is here now is shared with every child, and never garbage


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody answers a model that asks
        work()
        code = 0
    finally:
        # Not the interpreter's own end, which waits for threads that a fork does not have.
        sys.stderr.flush()
        os._exit(code)


def _answer(line: str) -> None:
    """Do what one line asks for: describe a model, or trace."""
    request = json.loads(line)
    if "describe" in request:
        from autotune.probe.torchrun.describe import main as describe

        describe(request["describe"])
    elif "predict" in request:
        from autotune.probe.virtual.predictor import answer

        answer(request["predict"])
    else:
        _serve(Job.from_json(line))


def _serve(job: Job) -> None:
    """Run a job's runs, one after the other."""
    from autotune.probe.virtual.session import Session

    sys.path.insert(0, job.working_directory)
    session = Session(job)
    failed = _failing(session, session.start)
    for candidate, path in job.runs:
        if failed is not None:
            write_error(path, failed)
            continue

        def run(candidate: Candidate = candidate, path: str = path) -> None:
            if (failure := _failing(session, lambda: session.run(candidate, path))) is not None:
                write_error(path, failure)

        _, status = os.waitpid(_fork(run), 0)
        if status:
            _mourn(path, status, session.reached)


def _bury(line: str, status: int) -> None:
    """Where the process of a job ended before its runs did: say so in place of each of them."""
    request = json.loads(line)
    for _, path in request.get("runs", []):
        with contextlib.suppress(OSError):
            _mourn(path, status, Phase.LOAD)


def _mourn(path: str, status: int, phase: str) -> None:
    if Path(path).exists() or error_path(path).exists():
        return
    code = os.waitstatus_to_exitcode(status)
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    write_error(path, {"kind": "crashed", "phase": str(phase), "message": f"the process that traced it {end}"})


def _failing(session: Any, work: Callable[[], None]) -> dict[str, Any] | None:
    """Do some work; where it fails, say how."""
    try:
        work()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a model raises is this candidate's outcome
        return failure_of(error, str(session.now))
    return None


if __name__ == "__main__":
    main()
