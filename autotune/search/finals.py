"""The finals: the best candidates and the reference measured again, longer; the winner comes from those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.candidate import Candidate
from autotune.machine.machine import Machine
from autotune.search.history import speed
from autotune.search.outcomes import fits
from autotune.store.records import ProbeRecord


@dataclass(frozen=True, slots=True)
class Finals:
    """Feasible confirmations.

    Attributes:
        reference: what the winner is compared with.
        finalists: fastest first; the first is the winner.
    """

    reference: ProbeRecord
    finalists: list[ProbeRecord]


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
) -> Finals | None:
    """Confirm the reference and the best, each once, in turn.

    A candidate whose confirmation does not run or does not fit is dropped, and the next best takes its place.

    Args:
        ranked: feasible probes, fastest first.
        untuned: the baseline's feasible probe where the baseline lies outside the space: a reference that cannot win.
        baseline: the untuned default.
        finalists: how many to confirm beside the reference.
        machine: whose memory, less headroom, is the limit.
        confirm: measures a candidate again, as number n of about m.

    Returns:
        None where no confirmation of a candidate of the space is feasible.
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
    confirmed: list[ProbeRecord] = []
    for record in ranked:
        if len(confirmed) < finalists and (final := feasible(record)):
            confirmed.append(final)
    if reference is None or not confirmed:
        return None
    if reference not in confirmed and any(record.candidate == reference.candidate for record in ranked):
        confirmed.append(reference)
    return Finals(reference, sorted(confirmed, key=speed, reverse=True))
