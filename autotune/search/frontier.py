"""The OOM frontier: what an OOM says about candidates that have not been tried."""

from __future__ import annotations

from autotune.candidate import Candidate
from autotune.probe.measurement import Measurement
from autotune.store.records import ProbeRecord


def implies(oom: Candidate, other: Candidate) -> bool:
    """Whether `other` must run out of memory because `oom` did.

    Only towards a larger micro-batch with every other knob equal. With a fixed global batch accumulation moves
    against micro_batch; that is allowed except to accumulation 1, where ZeRO-2 keeps no averaged gradients and a
    larger micro-batch can need less. Memory is not monotone in any other knob, the ZeRO stage included.
    """
    if other.micro_batch <= oom.micro_batch or _others(oom) != _others(other):
        return False
    same_batch = oom.micro_batch * oom.accumulation == other.micro_batch * other.accumulation
    return other.accumulation == oom.accumulation or (same_batch and other.accumulation > 1)


def inferred(source: ProbeRecord) -> Measurement:
    """The measurement of a candidate that runs out of memory because `source` did."""
    known = source.measurement
    return Measurement(
        outcome=known.outcome,
        probe_kind=known.probe_kind,
        phase=known.phase,
        message=f"micro-batch {source.candidate.micro_batch} is already out of memory (trial {source.trial})",
        needed_bytes=known.needed_bytes,
    )


class Frontier:
    """The OOMs that were really seen, found by the knobs that they share with a candidate."""

    def __init__(self) -> None:
        self._seen: dict[Candidate, list[ProbeRecord]] = {}

    def add(self, record: ProbeRecord) -> None:
        """Remember an OOM. An inferred one is none: the rule does not hold in chains."""
        if record.measurement.outcome.is_oom and not record.inferred:
            self._seen.setdefault(_others(record.candidate), []).append(record)

    def source(self, candidate: Candidate) -> ProbeRecord | None:
        """An OOM that says that the candidate is one too."""
        return next(
            (seen for seen in self._seen.get(_others(candidate), ()) if implies(seen.candidate, candidate)), None
        )


def _others(candidate: Candidate) -> Candidate:
    return candidate.replace(micro_batch=0, accumulation=0)
