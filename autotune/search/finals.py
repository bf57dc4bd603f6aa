"""The finals: the best candidates and the reference measured again, longer; the winner comes from those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.candidate import Candidate
from autotune.errors import NothingFeasible
from autotune.machine.machine import Machine
from autotune.search.history import speed
from autotune.search.outcomes import fits
from autotune.search.referee import PARITY, set_aside
from autotune.store.records import ProbeRecord, winner_of
from autotune.store.store import Store


@dataclass(frozen=True, slots=True)
class Finals:
    """Feasible confirmations.

    Attributes:
        reference: what the winner is compared with.
        finalists: fastest first, those at risk last; the first is the winner.
        aside: candidates that train differently from the reference.
    """

    reference: ProbeRecord
    finalists: list[ProbeRecord]
    aside: list[ProbeRecord]


def nearness(baseline: Candidate) -> Callable[[ProbeRecord], tuple[int, float]]:
    """A sort key: fewest knobs different from the baseline first, the faster first among equals."""
    return lambda record: (len(record.candidate.differences(baseline)), -speed(record))


def hold(
    ranked: Sequence[ProbeRecord],
    untuned: Sequence[ProbeRecord],
    baseline: Candidate,
    finalists: int,
    machine: Machine,
    confirm: Callable[[Candidate, int, int], ProbeRecord],
    compare: Callable[[ProbeRecord, ProbeRecord], ProbeRecord] = lambda record, reference: record,
) -> Finals | None:
    """Confirm the reference and the best, each once, in turn.

    A candidate whose confirmation does not run or does not fit is dropped, and the next best takes its place. So it
    does where a candidate is at risk, or trains differently from the reference, up to as many times as there are
    finalists: all of a model's candidates may be like that.

    Args:
        ranked: feasible probes, fastest first.
        untuned: the baseline's feasible probe where the baseline lies outside the space: a reference that cannot win.
        baseline: the untuned default.
        finalists: how many to confirm beside the reference.
        machine: whose memory, less headroom, is the limit.
        confirm: measures a candidate again, as number n of about m.
        compare: a confirmation with the reference's; its result says in its detail whether they train alike.

    Returns:
        None where no confirmation of a candidate of the space is feasible.

    Raises:
        NothingFeasible: of those that are, none trains as the reference does.
    """
    done: dict[Candidate, ProbeRecord] = {}
    references = sorted([*untuned, *ranked], key=nearness(baseline))
    about = min(finalists, len(ranked)) + (references[:1] != [] and references[0] not in ranked[:finalists])

    def feasible(record: ProbeRecord) -> ProbeRecord | None:
        candidate = record.candidate
        if candidate not in done:
            done[candidate] = confirm(candidate, len(done) + 1, max(about, len(done) + 1))
        return done[candidate] if fits(done[candidate].measurement, machine) else None

    reference = next(filter(None, map(feasible, references)), None) if ranked else None
    if reference is None:
        return None
    confirmed: list[ProbeRecord] = []
    aside: list[ProbeRecord] = []
    waiting = filter(None, map(feasible, ranked))

    def fill() -> None:
        """Confirm until there are enough that may win."""
        doubtful = [record for record in confirmed if record.measurement.at_risk] + aside
        while len(found) < finalists + min(len(doubtful), finalists) and (record := next(waiting, None)):
            found.append(record)
            confirmed.extend([] if record in confirmed else [record])
            doubtful += [record] if record.measurement.at_risk else []

    found: list[ProbeRecord] = []
    fill()
    if confirmed and reference not in confirmed and any(r.candidate == reference.candidate for r in ranked):
        confirmed.append(reference)
    while confirmed:
        best = min(confirmed, key=merit)
        confirmed.remove(best)
        compared = compare(best, reference)
        if not set_aside(compared.measurement):
            return Finals(reference, [compared, *sorted(confirmed, key=merit)], aside)
        aside.append(compared)
        fill()
    if aside:
        raise NothingFeasible(
            f"none of the {len(aside)} finalists trains as the reference does, trial {reference.trial}; "
            f"the fastest: {aside[0].measurement.detail[PARITY]['reason']}",
            "see whether the model's loss is a mean over its micro-batch, and whether its forward pass depends on the "
            "stage or on what is checkpointed",
        )
    return None


def merit(record: ProbeRecord) -> tuple[bool, float]:
    """A sort key of confirmations: those at risk last, then the faster first."""
    return record.measurement.at_risk is not None, -speed(record)


def crown(store: Store, winner: ProbeRecord) -> None:
    """Say which probe wins its study: what is planned never takes the place of what was measured."""
    known = winner_of(store.study(winner.study), store.probes(winner.study))
    if known is None or known.measurement.predicted or not winner.measurement.predicted:
        store.set_winner(winner.study, winner.trial)
