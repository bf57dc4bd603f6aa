"""Sees to it that a winner trains like the reference: their confirmations compared, or probes at a common batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.probe.measurement import Measurement, Outcome
from autotune.search.parity import Parity, Trace, compare, unknown
from autotune.store.records import ProbeRecord
from autotune.store.store import Store

PARITY = "parity"
"""In the detail of a measurement: what its comparison with the reference found."""
COMPARISON = "comparison"
"""In the detail of a measurement that was only made to be compared."""
STEPS = 5
"""Measured steps of a probe that is only made to be compared: with its warm-up eight losses."""


class Referee:
    """Compares confirmations of one sweep.

    Args:
        machine: of the study: its devices make the global batch.
        store: keeps what a comparison found, with the confirmation.
        probe: runs a candidate for so many measured steps, in full.
        tell: takes a sentence about what takes time.
    """

    def __init__(
        self,
        machine: Machine,
        store: Store,
        probe: Callable[[Candidate, int], ProbeRecord],
        tell: Callable[[str], None],
    ) -> None:
        self._machine, self._store, self._probe, self._tell = machine, store, probe, tell

    def compare(self, record: ProbeRecord, reference: ProbeRecord) -> ProbeRecord:
        """Compare a confirmation with the reference's.

        Returns:
            The confirmation, stored anew with what was found in its detail.
        """
        if record.key == reference.key or not record.measurement.losses:
            return record  # there is nothing to compare: it is the reference itself, or was not run here
        batches = [self._batch(r.candidate) for r in (record, reference)]
        common = math.lcm(*batches)
        if batches[0] == batches[1]:
            found = _compared(record, reference)
        else:
            self._tell(f"comparing trial {record.trial} with trial {reference.trial} at a global batch of {common}")
            found = _compared(*(self._at_batch(r.candidate, common) for r in (record, reference)))
        if found.agrees is False:
            self._tell(f"trial {record.trial} is set aside: {found.reason}")
        told = {"reference_trial": reference.trial, "global_batch": common, **found.to_dict()}
        return self._store.amend(record, {PARITY: told})

    def _at_batch(self, candidate: Candidate, batch: int) -> ProbeRecord:
        """A short probe of the candidate that accumulates up to a global batch."""
        micro_steps = batch // (candidate.micro_batch * self._machine.world_size)
        return self._probe(replace(candidate, accumulation=micro_steps), STEPS)

    def _batch(self, candidate: Candidate) -> int:
        return candidate.micro_batch * candidate.accumulation * self._machine.world_size


def set_aside(measurement: Measurement) -> bool:
    """Whether a confirmation was found to train differently from the reference."""
    return measurement.detail.get(PARITY, {}).get("agrees") is False


def _compared(record: ProbeRecord, reference: ProbeRecord) -> Parity:
    for which, measured in (("it", record.measurement), ("the reference", reference.measurement)):
        if measured.outcome is not Outcome.OK:
            return unknown(f"{which} could not be probed at the common global batch: {measured.outcome.value}")
    return compare(
        *(Trace(r.candidate.precision, r.measurement.losses, r.measurement.gradient_norms) for r in (record, reference))
    )
