"""What a study knows about its candidates: which are settled, which is best, what is spent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Outcome
from autotune.search.frontier import Frontier
from autotune.search.outcomes import fits
from autotune.store.records import ProbeRecord

FAILURES = frozenset({Outcome.CRASHED, Outcome.INVALID, Outcome.DIVERGED, Outcome.TIMEOUT})
CRASHES_THAT_COUNT = 2
DEADLY = "workers_died"
"""In the detail of an `infra` that is not tried again: so many workers died while they probed the candidate."""
SLOW_MACHINE = "slow_machine"
"""In the detail of a measurement: by how much the machine was slower than usual, as a share."""


class History:
    """The probes of a study, old ones and those of this run, seen from one space.

    Args:
        records: what the store holds.
        machine: whose memory, less headroom, is the limit.
        belongs: whether a candidate is one of this sweep.
        conditions: the reuse key under which this run would measure a record's candidate, neighbours as they were.
        optuna_study: what this sweep's own probes are marked with.
    """

    def __init__(
        self,
        records: Iterable[ProbeRecord],
        machine: Machine,
        belongs: Callable[[Candidate], bool],
        conditions: Callable[[ProbeRecord], str],
        optuna_study: str,
    ) -> None:
        self._machine, self._belongs, self._conditions = machine, belongs, conditions
        self._optuna_study = optuna_study
        self._settled: dict[Candidate, ProbeRecord] = {}
        self._crashes: Counter[Candidate] = Counter()
        self._slow_stops: dict[Candidate, list[ProbeRecord]] = {}
        self._spent: set[Candidate] = set()
        self._feasible: dict[Candidate, ProbeRecord] = {}
        self.frontier = Frontier()
        self.records: list[ProbeRecord] = []
        self.best: ProbeRecord | None = None
        self.since_best = 0
        self._old = 0
        for record in records:
            self.add(record)
            self._old = record.trial

    def add(self, record: ProbeRecord) -> None:
        """Take in one more probe."""
        self.records.append(record)
        candidate, outcome = record.candidate, record.measurement.outcome
        gave_up = outcome is Outcome.INFRA and DEADLY in record.measurement.detail
        if record.confirmation or (outcome is Outcome.INFRA and not gave_up):
            return
        outdated = outcome in FAILURES or gave_up or record.measurement.predicted
        if outdated and record.reuse_key != self._conditions(record):
            return  # failed or predicted with another version of something, or of the model's source: not settled
        if outcome is Outcome.CRASHED:
            settles = self.crash_settles(candidate)
            self._crashes[candidate] += 1
            if not settles:
                return
        if outcome is Outcome.STOPPED and SLOW_MACHINE in record.measurement.detail:
            self._slow_stops.setdefault(candidate, []).append(record)
        self._settled[candidate] = record
        self.frontier.add(record)
        started = not record.inferred and not record.reused
        if started and record.optuna_study == self._optuna_study:
            self._spent.add(candidate)
        if self._belongs(candidate):
            self._rank(record, started)

    def _rank(self, record: ProbeRecord, started: bool) -> None:
        if fits(record.measurement, self._machine):
            self._feasible[record.candidate] = record
            if self.best is None or speed(record) > speed(self.best):
                self.best, self.since_best = record, 0
                return
        if started and self.best is not None:
            self.since_best += 1

    def crash_settles(self, candidate: Candidate) -> bool:
        """Whether one more crash settles the candidate."""
        return self._crashes[candidate] + 1 >= CRASHES_THAT_COUNT

    def settled(self, candidate: Candidate) -> ProbeRecord | None:
        """The probe after which the candidate need not be tried again, None where it is still to be tried.

        A probe that an earlier run stopped settles its candidate only where something in this sweep beats its bound:
        in another space, or with more headroom, it might win.
        """
        record = self._settled.get(candidate)
        if record is not None and record.measurement.outcome is Outcome.STOPPED and record.trial <= self._old:
            beaten = self.best is not None and speed(self.best) >= speed(record)
            return record if beaten else None
        return record

    def doubtful(self) -> list[ProbeRecord]:
        """Probes that were stopped, once, while the machine was slow, and at its usual pace might win after all."""
        enough = speed(self.best) if self.best is not None else 0.0
        return [
            records[0]
            for candidate, records in self._slow_stops.items()
            if self._settled[candidate] is records[0]
            and speed(records[0]) * (1 + records[0].measurement.detail[SLOW_MACHINE]) > enough
        ]

    def settling(self) -> list[ProbeRecord]:
        """The settling probes of this sweep's candidates, in their order."""
        mine = [self.settled(candidate) for candidate in self._settled if self._belongs(candidate)]
        return sorted(filter(None, mine), key=lambda record: record.trial)

    def feasible(self) -> list[ProbeRecord]:
        """The feasible probes of this sweep's candidates, fastest first."""
        return sorted(self._feasible.values(), key=speed, reverse=True)

    @property
    def first(self) -> ProbeRecord | None:
        """The settling probe of the candidate that was settled first: mostly the untuned default."""
        return next(iter(self._settled.values()), None)

    @property
    def tried(self) -> int:
        """How many of this sweep's candidates are settled."""
        return sum(1 for candidate in self._settled if self._belongs(candidate) and self.settled(candidate))

    @property
    def spent(self) -> int:
        """Candidates that this sweep settled by starting processes."""
        return len(self._spent)

    @property
    def worst(self) -> float | None:
        """Log tokens/s of the slowest feasible candidate, None where there is none."""
        return math.log(min(map(speed, self._feasible.values()))) if self._feasible else None

    @property
    def runs(self) -> bool:
        """Whether any candidate got as far as using memory or finishing a step: the model itself works."""
        return any(
            r.measurement.outcome.is_oom or r.measurement.outcome.measured_memory for r in self._settled.values()
        )


def speed(record: ProbeRecord) -> float:
    """Global tokens per second, 0 where nothing was measured."""
    return record.measurement.tokens_per_s or 0.0
