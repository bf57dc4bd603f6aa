"""What a finished sweep hands over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from autotune.search.history import History, speed
from autotune.store.records import ProbeRecord


@dataclass(frozen=True, slots=True)
class Counts:
    """What a sweep did, earlier runs of it included.

    Attributes:
        outcomes: candidates by outcome, inferred and reused ones included.
        probed: candidates measured by processes that this sweep started.
        inferred: OOMs that needed no process.
        reused: measurements taken over from other studies.
        feasible: candidates that ran, or are predicted to run, and leave the headroom free.
        repeats: proposals of this run that had been tried or that a rule refuses.
    """

    outcomes: Counter[str]
    probed: int
    inferred: int
    reused: int
    repeats: int
    feasible: int = 0

    @classmethod
    def of(cls, history: History, repeats: int) -> Counts:
        """What a history says was done."""
        records = history.settling()
        return cls(
            outcomes=Counter(record.measurement.outcome.value for record in records),
            probed=history.spent,
            inferred=sum(record.inferred for record in records),
            reused=sum(record.reused for record in records),
            repeats=repeats,
            feasible=len(history.feasible()),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a sweep that found a winner.

    Attributes:
        winner: its confirmation; where candidates are predicted, its prediction.
        reference: the confirmation that the winner is compared with: of the untuned baseline where it fits, else of
            the feasible candidate that differs from it in fewest knobs.
        baseline: the untuned default's own probe, whatever became of it; None where it cannot run here at all.
        confirmations: of this sweep's finalists and reference, fastest first (where candidates are predicted: their
            predictions).
        counts: what was done.
        reason: why the search ended.
        aside: confirmations that would have won, of candidates that train differently from the reference.
    """

    winner: ProbeRecord
    reference: ProbeRecord
    baseline: ProbeRecord | None
    confirmations: list[ProbeRecord]
    counts: Counts
    reason: str
    aside: list[ProbeRecord] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """The winner's throughput as a multiple of the reference's."""
        return speed(self.winner) / speed(self.reference)

    @property
    def significant(self) -> bool:
        """Whether the winner's spread lies wholly above the reference's."""
        low, high = self.winner.measurement.tokens_per_s_low, self.reference.measurement.tokens_per_s_high
        return low is not None and high is not None and low > high
