"""The launcher of several nodes: starts a program on each, lets them meet, and gathers what their ranks leave behind.

How node programs are started and what became of them is a Transport's to know: Slurm's steps, or ssh.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.errors import InfraError
from autotune.machine.machine import Machine
from autotune.probe.torchrun.launcher import AgentReport, Tell
from autotune.probe.torchrun.remote.channel import Channel, Conversation
from autotune.probe.torchrun.remote.wire import Frame
from autotune.probe.torchrun.starting import describe_here

NODE_PROGRAM = "autotune.probe.torchrun.remote.node"
PEERS_S = 3.0
"""When a node's part has failed, the ranks of the others have so long to say what they saw, seconds."""
LATE_S = 15.0
"""Nodes end their ranks at the deadline by themselves; so much later the controller ends them, seconds."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a channel ended before its nodes were done.

    Attributes:
        message: one sentence.
        timed_out: a time limit of the probe's own ended it.
    """

    message: str
    timed_out: bool = False


class Transport(Protocol):
    """Starts node programs and knows what became of them."""

    name: str

    def prepare(self) -> bool:
        """Have the nodes, which may take its time; True where they are others than before.

        Raises:
            InfraError: they cannot be had.
        """
        ...

    def variables(self) -> dict[str, str]:
        """Variables of the environment that the node programs are still to be given."""
        ...

    def open(self, directory: Path, environ: dict[str, str]) -> list[Channel]:
        """Start a node program on every node; logs go into the directory."""
        ...

    def address(self, hello: Frame) -> str:
        """Where the other nodes reach the one that said hello, the first."""
        ...

    def loss(self, channel: Channel, elapsed_s: float) -> Loss:
        """What became of a channel that ended so long after its nodes had started."""
        ...

    def refusal(self, channel: Channel) -> InfraError | None:
        """Why node programs cannot be started, with what to do about it; None where something else ended them."""
        ...

    def close(self) -> None:
        """Give the nodes back."""
        ...


class Remote:
    """Runs each probe on the nodes that a transport reaches.

    Args:
        transport: Slurm's steps, or ssh.
        machine: its nodes.
        environ: of processes here.
        start_s: node programs may take so long to start, seconds; that is no part of a probe's deadline.
        tell: takes a sentence when something takes its time.

    Attributes:
        reached: whether node programs have started on these nodes.
    """

    def __init__(
        self, transport: Transport, machine: Machine, environ: dict[str, str], start_s: float, tell: Tell
    ) -> None:
        self.name = transport.name
        self._transport, self._nodes, self._environ = transport, machine.nodes, environ
        self._start_s, self._tell = start_s, tell
        self.reached = False

    def describe(self, directory: Path) -> None:
        """See Launcher: the nodes are had first, because the time until then is no part of the sweep's."""
        self._transport.prepare()
        describe_here(directory, self._environ)

    def run(self, spec_path: Path, world: int, deadline_s: float) -> AgentReport:
        """See Launcher."""
        if self._transport.prepare():
            self.reached = False
        directory = spec_path.parent
        conversation = Conversation(self._transport.open(directory, self._environ), directory, self._tell)
        try:
            return self._converse(conversation, spec_path.read_text(), deadline_s)
        finally:
            conversation.end()

    def close(self) -> None:
        """See Launcher."""
        self._transport.close()

    def endpoint(self, hello: Frame) -> tuple[str, int]:
        """Host and port where the nodes meet, from the first node's hello."""
        return self._transport.address(hello), hello["port"]

    def _converse(self, conversation: Conversation, spec: str, deadline_s: float) -> AgentReport:
        conversation.send("request", spec=spec, prepared=self.reached, environ=self._transport.variables())
        start = time.monotonic()
        while len(conversation.hellos) < self._nodes:
            conversation.listen(0.2)
            if lost := conversation.lost():
                lost.end()
                if not self.reached and (refusal := self._transport.refusal(lost)):
                    raise refusal
                return _failure(self._transport.loss(lost, 0.0))
            if time.monotonic() > start + self._start_s:
                missing = [str(node) for node in range(self._nodes) if node not in conversation.hellos]
                return _failure(Loss(f"node {', '.join(missing)} had not started after {self._start_s:.0f} s"))
        self.reached = True
        host, port = self.endpoint(conversation.hellos[0])
        conversation.send("go", host=host, port=port, id=uuid.uuid4().hex, deadline_s=deadline_s)
        return self._watch(conversation, deadline_s)

    def _watch(self, conversation: Conversation, deadline_s: float) -> AgentReport:
        """Wait until every node has ended; when one has failed, end the others soon, who may wait for it."""
        went = time.monotonic()
        failed_at: float | None = None
        told = False
        while len(conversation.ends) < self._nodes:
            conversation.listen(0.2)
            now = time.monotonic()
            if lost := conversation.lost():
                lost.end()
                return merged(conversation.ends, self._nodes, self._transport.loss(lost, now - went))
            if failed_at is None and any(map(_is_bad, conversation.ends.values())):
                failed_at = now
            if failed_at is not None and now > failed_at + PEERS_S and not told:
                conversation.send("stop")
                told = True
            if now > went + deadline_s + LATE_S:
                return merged(conversation.ends, self._nodes, Loss("the nodes did not end at the deadline", True))
        return merged(conversation.ends, self._nodes, None)


def merged(ends: dict[int, Frame], nodes: int, loss: Loss | None) -> AgentReport:
    """One report from those of the nodes: the first that failed says why, what came later is its consequence.

    Args:
        ends: node → its last frame, in the order in which they came.
        nodes: how many there should be.
        loss: why a node said no last word; None where all did.
    """
    reports = [end["report"] for end in ends.values()]
    nothing: AgentReport = {"exit_codes": {}, "error": None}
    first = next((end["report"] for end in ends.values() if _is_bad(end)), nothing)
    if loss and not loss.timed_out and first is nothing:
        first = nothing | {"error": loss.message}
    hosts = [ends[node]["report"].get("hosts") if node in ends else None for node in range(nodes)]
    return {
        "exit_codes": first["exit_codes"],
        "error": first["error"],
        "timed_out": any(report.get("timed_out") for report in reports) or bool(loss and loss.timed_out),
        "stopped": [rank for report in reports for rank in report.get("stopped", [])],
        "vanished": next((r["vanished"] for r in reports if r.get("vanished") is not None), None),
        "hosts": [host[0] if host else {"peak_bytes": 0, "full": None} for host in hosts],
    }


def _failure(loss: Loss) -> AgentReport:
    return merged({}, 0, loss)


def _is_bad(end: Frame) -> bool:
    """Whether a node's part failed by itself."""
    report = end["report"]
    told = report["exit_codes"] or report["error"] or report.get("timed_out") or report.get("vanished") is not None
    return bool(told or any(host["full"] for host in report["hosts"])) and not end["stopped"]
