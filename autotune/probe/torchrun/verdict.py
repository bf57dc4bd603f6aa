"""From what ranks and their agent left behind to one outcome: total, whatever is missing."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from autotune.probe.measurement import Outcome
from autotune.probe.torchrun.host_memory import HostFull
from autotune.probe.torchrun.spec import CANNOT_WRITE, Beat, RankResult
from autotune.workload.phase import Phase


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a probe after its end.

    Attributes:
        results: of each rank; None where a rank left none, or none that is whole.
        torn: ranks that left a result that is not whole.
        beats: what each rank last said of itself; None where it never started.
        exit_codes: of ranks that ended by themselves before their agent ended them; negative for signals.
        timed_out: whether the deadline ended it.
        stopped: ranks that a signal had stopped by then.
        vanished: the rank whose end without a word ended it.
        agent_error: what kept the launcher from its work.
        kernel_killed: whether the kernel's OOM killer was at work meanwhile.
        host_full: why the ranks of a node were ended by the guard of its memory.
        full: a place without room that ranks need (/dev/shm, the disk of the run directory); None where there is room.
    """

    results: list[RankResult | None]
    beats: list[Beat | None]
    exit_codes: dict[int, int]
    timed_out: bool
    vanished: int | None
    agent_error: str | None
    kernel_killed: bool
    host_full: HostFull | None = None
    stopped: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    full: str | None = None

    def phase(self, rank: int) -> Phase | None:
        """What a rank was last doing; None where it never started."""
        beat = self.beats[rank] if rank < len(self.beats) else None
        return beat.phase if beat is not None else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome, where and on which rank it came about, and why in one sentence."""

    outcome: Outcome
    phase: Phase | None = None
    rank: int | None = None
    message: str | None = None
    trace: str | None = None


def judge(evidence: Evidence) -> Verdict:
    """The verdict on a probe.

    A rank that told its own failure is believed before anything else; of several the first in time is the cause,
    except that running out of memory explains what its peers see, and not the other way round. Then come the
    guard of the host's memory, the launcher's own trouble, the deadline, deaths without a word, what peers saw, and
    last silence.
    """
    failed = [r for r in evidence.results if r is not None and r.failure is not None]
    told = [r for r in failed if not r.peer_lost]
    if told:
        cause = min(told, key=lambda r: (not str(r.failure).startswith("oom"), r.at))
        return Verdict(Outcome(str(cause.failure)), _phase(cause.phase), cause.rank, cause.message, cause.trace)
    if evidence.results and not failed and None not in evidence.results:
        stopped = any(r is not None and r.stopped for r in evidence.results)
        return Verdict(Outcome.STOPPED if stopped else Outcome.OK)
    if evidence.host_full is not None:
        full = evidence.host_full
        phase = evidence.phase(full.rank) if full.rank is not None else None
        return Verdict(Outcome.OOM_HOST if full.ours else Outcome.INFRA, phase, full.rank, full.message)
    if evidence.agent_error is not None:
        return Verdict(Outcome.INFRA, message=f"{evidence.agent_error}{_for(evidence)}")
    if evidence.torn:
        return Verdict(Outcome.INFRA, rank=evidence.torn[0], message=_unwritten(evidence, evidence.torn[0]))
    if evidence.timed_out:
        late = _last(evidence)
        if not late:
            return Verdict(Outcome.INFRA, message="no rank had begun by the deadline")
        who = f"rank {late[0]} was" if len(late) == 1 else f"ranks {', '.join(map(str, late))} were"
        message = f"{who} not done by the deadline (probe.deadline_s)"
        return Verdict(Outcome.TIMEOUT, evidence.phase(late[0]), late[0], message)
    if evidence.vanished is not None:
        return _silent_death(evidence, evidence.vanished, evidence.exit_codes.get(evidence.vanished, 0))
    silent_codes = {r: code for r, code in evidence.exit_codes.items() if r not in {f.rank for f in failed}}
    if silent_codes:
        rank, code = min(silent_codes.items(), key=lambda item: (-item[1] == signal.SIGTERM, item[0]))
        return _silent_death(evidence, rank, code)
    silent = next((rank for rank, r in enumerate(evidence.results) if r is None), None)
    if silent is None:
        seen = min(failed, key=lambda r: r.at)
        return Verdict(Outcome.CRASHED, _phase(seen.phase), seen.rank, seen.message, seen.trace)
    return _silent_death(evidence, silent, 0)


def _last(evidence: Evidence) -> list[int]:
    """The ranks that may be what the others wait for: stopped ones, else those without a result come least far."""
    beats = {rank: beat for rank, beat in enumerate(evidence.beats) if beat is not None}
    if stopped := [rank for rank in evidence.stopped if rank in beats]:
        return stopped
    open_ones = {rank: beat.progress for rank, beat in beats.items() if evidence.results[rank] is None}
    least = min(open_ones.values(), default=0)
    return [rank for rank, progress in open_ones.items() if progress == least] or list(beats)


def _silent_death(evidence: Evidence, rank: int, code: int) -> Verdict:
    """What a death without a result means; code 0 also where the agent has not told it."""
    phase = evidence.phase(rank)
    if code in (0, -signal.SIGKILL) and evidence.kernel_killed:
        return Verdict(Outcome.OOM_HOST, phase, rank, f"the kernel killed rank {rank}: the host's memory ran out")
    if code == CANNOT_WRITE:
        return Verdict(Outcome.INFRA, phase, rank, _unwritten(evidence, rank))
    how = "ended" if code == 0 else f"was killed by {_signal(code)}" if code < 0 else f"exited with code {code}"
    if phase is None:
        return Verdict(Outcome.INFRA, rank=rank, message=f"rank {rank} {how} before it had begun{_for(evidence)}")
    if evidence.full is not None and code in _TOUCHED_NOTHING:
        return Verdict(Outcome.INFRA, phase, rank, f"rank {rank} {how}{_for(evidence)}")
    return Verdict(Outcome.CRASHED, phase, rank, f"rank {rank} {how} without a result")


def _unwritten(evidence: Evidence, rank: int) -> str:
    return f"rank {rank} could not write its result{_for(evidence)}"


def _for(evidence: Evidence) -> str:
    return f": {evidence.full} is full" if evidence.full is not None else ""


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


_TOUCHED_NOTHING = (-signal.SIGBUS, -signal.SIGSEGV)
"""How a process ends that touches memory of a file for which there is no room, or whose mapping had failed."""


def _phase(name: str | None) -> Phase | None:
    return Phase(name) if name else None


def memory_by_phase(results: list[RankResult | None]) -> dict[str, list[dict[str, Any]]]:
    """Phase → that phase's meters of every rank that has them, each with its rank."""
    phases: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        for phase, meters in (result.memory if result is not None else {}).items():
            assert result is not None
            phases.setdefault(phase, []).append({"rank": result.rank, **meters})
    return phases


def worst(memory: dict[str, list[dict[str, Any]]], meter: str) -> tuple[int, int] | None:
    """(bytes, rank) of the largest reading of a meter over all phases and ranks; None where nothing has it."""
    readings = [(m[meter], -m["rank"]) for ranks in memory.values() for m in ranks if m.get(meter) is not None]
    if not readings:
        return None
    size, rank = max(readings)
    return size, -rank
