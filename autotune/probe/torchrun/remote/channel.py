"""A connection to the node programs of a probe, and a conversation over all of them."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InfraError
from autotune.probe.torchrun.launcher import Tell
from autotune.probe.torchrun.remote.wire import Decoder, Frame, encode

LEAVE_S = 10.0
"""Node programs whose input has ended have so long to end their ranks and themselves, seconds."""
_FILE = re.compile(r"rank\d+\.(json|pulse)|logs/\d+/\d+/stderr\.log")


@dataclass
class Channel:
    """One process here (srun, or ssh) that carries the frames of one or more nodes.

    Attributes:
        process: its stdin takes frames for all of its nodes, its stdout gives theirs.
        nodes: their numbers.
        log: takes what is said on stderr; nothing is decided by it.
    """

    process: subprocess.Popen[bytes]
    nodes: Sequence[int]
    log: Path
    open: bool = True

    @classmethod
    def start(cls, command: list[str], environ: Mapping[str, str], nodes: Sequence[int], log: Path) -> Channel:
        """Start a command that runs node programs.

        It is not made to die with this process: at the end of its input the node programs end, and then it.
        """
        with log.open("wb") as said:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # Ctrl-C in the terminal is the controller's to handle
            )
        return cls(process, nodes, log)

    @property
    def last_line(self) -> str:
        """What it said last on stderr, for someone to read."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end(self, patience_s: float = LEAVE_S) -> int:
        """Have it end, by force where it has not done so after some patience, and return its exit code."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        for more in (self.process.terminate, self.process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(patience_s)
            more()
            patience_s = LEAVE_S
        return self.process.wait()


class Conversation:
    """What is said between the controller and the nodes in one probe.

    Args:
        channels: to all nodes.
        directory: the run directory, where the ranks' files are laid as if they were local.
        tell: takes what the nodes have to tell while something takes its time.

    Attributes:
        hellos: node → its hello.
        ends: node → its last frame, in the order in which they came.
    """

    def __init__(self, channels: Sequence[Channel], directory: Path, tell: Tell) -> None:
        self.channels, self._directory, self._tell = channels, directory, tell
        self.hellos: dict[int, Frame] = {}
        self.ends: dict[int, Frame] = {}
        self._selector = selectors.DefaultSelector()
        for channel in channels:
            assert channel.process.stdout is not None
            self._selector.register(channel.process.stdout, selectors.EVENT_READ, (channel, Decoder()))

    def send(self, kind: str, **content: object) -> None:
        """Send a frame to every node; one that is gone does not get it."""
        data = encode({"kind": kind, **content}, "controller")
        for channel in self.channels:
            assert channel.process.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                channel.process.stdin.write(data)
                channel.process.stdin.flush()

    def listen(self, timeout_s: float) -> None:
        """Take what nodes say, for so long at most.

        Raises:
            InfraError: a node cannot do its part.
        """
        for key, _ in self._selector.select(timeout_s):
            channel, decoder = key.data
            data = os.read(key.fd, 65536)
            if not data:
                self._selector.unregister(key.fileobj)
                channel.open = False
            for frame in decoder.feed(data):
                self._take(frame)

    def lost(self) -> Channel | None:
        """A channel that has ended before all of its nodes had; None where there is none."""
        return next((c for c in self.channels if not c.open and not self.ends.keys() >= set(c.nodes)), None)

    def end(self) -> None:
        """End the node programs, and with them the ranks."""
        deadline = time.monotonic() + LEAVE_S
        for channel in self.channels:
            with contextlib.suppress(OSError):
                assert channel.process.stdin is not None
                channel.process.stdin.close()
        while any(c.open for c in self.channels) and time.monotonic() < deadline:
            with contextlib.suppress(InfraError):  # what a node says now changes nothing
                self.listen(0.1)
        for channel in self.channels:
            channel.end(max(deadline - time.monotonic(), 0.1))
            assert channel.process.stdout is not None
            channel.process.stdout.close()
        self._selector.close()

    def _take(self, frame: Frame) -> None:
        kind, node = frame["kind"], frame["node"]
        if kind == "hello":
            self.hellos[node] = frame
        elif kind == "news":
            self._tell(frame["text"])
        elif kind == "end":
            self.ends[node] = frame
        elif kind == "failed":
            raise InfraError(f"node {frame['host']}: {frame['message']}", frame["hint"])
        elif kind == "file" and _FILE.fullmatch(frame["name"]):
            path = self._directory / frame["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(base64.b64decode(frame["data"]))
            os.replace(part, path)
