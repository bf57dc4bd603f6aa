"""One node's part of a probe, started there by srun or ssh: `python -m autotune.probe.torchrun.remote.node [NODE]`.

It reads frames from its standard input and writes frames to its standard output (wire.py); no file system is shared:

    controller → node   request   the spec, the deadline, variables of the environment
    node → controller   hello     everything is imported and compiled; a port that is free here
    controller → node   go        where the nodes meet; the deadline begins
    node → controller   file      a rank's result or pulse, as it changes, and its log where it failed
    controller → node   stop      the probe has ended elsewhere
    node → controller   end       the agent's report

The standard input is its leash too: at its end (the controller is dead, the connection gone) and at SIGTERM the ranks
are ended, then this program. Ranks are forked by the warm launcher, which lives here as long as the probe.
"""

from __future__ import annotations

import base64
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autotune.errors import AutotuneError, InfraError
from autotune.machine.detect import not_here_reason
from autotune.probe.torchrun.launcher import AgentReport, environment
from autotune.probe.torchrun.placement import placement
from autotune.probe.torchrun.remote.wire import Decoder, Frame, encode
from autotune.probe.torchrun.rundir import remove_stale, run_directory
from autotune.probe.torchrun.spec import ProbeSpec, RankResult, Rendezvous
from autotune.probe.torchrun.warm import Warm

NEWS_S = 0.5
"""Pulses and results are sent so often, seconds: rarely enough not to disturb what is timed."""
LAST_S = 15.0
"""A node program that was told to end, and did not, ends so much later without cleaning up, seconds."""
TAIL = 4000
"""Bytes of a failed rank's log that are sent."""


_ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class _Ended(Exception):
    """The probe ends here, because the controller says so, or is gone, or the node's manager says so."""


class _Line:
    """The connection to the controller, with a thread of its own that listens and carries files."""

    def __init__(self, node: int) -> None:
        self.node = node
        self._out = os.dup(1)
        os.dup2(2, 1)  # what libraries print must not come between frames
        self._lock = threading.Lock()
        self._carried: dict[Path, bytes] = {}
        self._directory: Path | None = None
        self.inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.stopped = False

    def send(self, kind: str, **content: object) -> None:
        """Send a frame."""
        data = encode({"node": self.node, "kind": kind, **content}, str(self.node))
        with self._lock:
            while data:
                data = data[os.write(self._out, data) :]

    @contextmanager
    def carrying(self, directory: Path) -> Iterator[None]:
        """Send the ranks' files in a directory as they change, and once more at the end."""
        self._directory = directory
        try:
            yield
        finally:
            self._directory = None
            self._carry(directory)

    def listen(self) -> None:
        """Take frames until the controller says stop or is gone; then end the main thread's work."""
        decoder = Decoder()
        while True:
            if select.select([0], [], [], NEWS_S)[0]:
                data = os.read(0, 65536)
                for frame in decoder.feed(data):
                    self.stopped = self.stopped or frame["kind"] == "stop"
                    self.inbox.put(frame)
                if self.stopped or not data:
                    break
            if directory := self._directory:
                self._carry(directory)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(LAST_S)
        os._exit(1)  # the kernel ends the ranks with us

    def _carry(self, directory: Path) -> None:
        for path in sorted([*directory.glob("rank*.json"), *directory.glob("rank*.pulse")]):
            data = path.read_bytes()
            if self._carried.get(path) != data:
                self._carried[path] = data
                self.send("file", name=path.name, data=base64.b64encode(data).decode())


def main() -> None:
    """Take part in one probe."""
    node = int(sys.argv[1] if len(sys.argv) > 1 else os.environ["SLURM_NODEID"])
    line = _Line(node)
    for number in _ENDINGS:
        signal.signal(number, _end_once)
    threading.Thread(target=line.listen, daemon=True).start()
    try:
        report = _serve(line)
        _deafen()  # the controller hangs up at the last word
        line.send("end", report=report, stopped=False)
    except _Ended:
        if not line.stopped:
            sys.exit(1)
        line.send("end", report={"exit_codes": {}, "error": None, "hosts": []}, stopped=True)
    except AutotuneError as error:
        _deafen()
        line.send("failed", host=socket.gethostname(), message=error.message, hint=error.hint)


def _end_once(number: int, frame: object) -> None:
    _deafen()  # Slurm repeats itself, and the ranks are being ended already
    raise _Ended


def _deafen() -> None:
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def _serve(line: _Line) -> AgentReport:
    """The node's part of the probe; everything of it is gone when this returns."""
    request = line.inbox.get()
    os.environ.update(request["environ"])
    remove_stale()  # of node programs that were killed
    with run_directory() as directory:
        (directory / "spec.json").write_text(request["spec"])
        spec = ProbeSpec.read(directory / "spec.json")
        ranks = spec.machine.devices_per_node
        if reason := not_here_reason(replace(spec.machine, nodes=1)):
            raise InfraError(reason, "machine=… says what every node is, and all must be alike")
        environ = environment(spec.machine, spec.workload, spec.threads)
        warm = Warm(environ, lambda text: line.send("news", text=text), prepared=request["prepared"])
        try:
            warm.start()
            line.send("hello", host=socket.gethostname(), port=_free_port(), slurm=_slurm())
            go = line.inbox.get()
            spec = replace(
                spec,
                directory=str(directory),
                processors=placement(sorted(os.sched_getaffinity(0)), ranks, spec.threads)[1],
                rendezvous=_rendezvous(go["host"], go["port"], go["id"], first=line.node == 0),
            )
            with line.carrying(directory):
                report = warm.run(spec.write(), spec.machine.world_size, go["deadline_s"])
            for path, tail in _failed_logs(directory, line.node, ranks):
                line.send("file", name=path, data=base64.b64encode(tail).decode())
        finally:
            warm.close()
    return report


def _rendezvous(host: str, port: int, identifier: str, first: bool) -> Rendezvous:
    """Where the agents meet, and under which address this node is known to the others: that from which it goes there.

    Names may resolve differently from node to node, and a host has several addresses.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(address)  # sends nothing: it only chooses the route
        mine = str(towards.getsockname()[0])
    return Rendezvous(f"{host}:{port}", identifier, first, host if first else mine)


def _free_port() -> int:
    """A port that nobody listens on here now; should someone take it meanwhile, the probe is tried again."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _slurm() -> dict[str, str]:
    """What Slurm calls this node and this step."""
    return {name: value for name, value in os.environ.items() if name in ("SLURMD_NODENAME", "SLURM_STEP_ID")}


def _failed_logs(directory: Path, node: int, ranks: int) -> Iterator[tuple[str, bytes]]:
    """The ends of the logs of local ranks that left no good result, under the name that they have on the controller."""
    known = [int(path.stem.removeprefix("rank")) for path in directory.glob("rank*.pulse")]
    first = min(known) // ranks * ranks if known else node * ranks
    for log in sorted(directory.glob("logs/**/stderr.log")):
        rank = first + int(log.parent.name)
        result = RankResult.read(directory, rank)
        if (result is None or result.failure) and (text := log.read_bytes().strip()):
            yield f"logs/{node}/{rank}/stderr.log", text[-TAIL:]


if __name__ == "__main__":
    main()
